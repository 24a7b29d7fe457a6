"""`convert --to dcp`: a checkpoint written anew by orlop's writer, each tensor in as few chunks as memory allows.

What comes out has orlop's indexes and checksums, whatever went in, and plain `dcp.load` reads it. Owns the plan of that
save. Must not know other formats.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from orlop import compat
from orlop.dcp.boxes import Box
from orlop.dcp.catalog import Extent
from orlop.dcp.storage import with_aliases
from orlop.dcp.writer import Writer
from orlop.store import publish
from orlop.store.manifest import Manifest
from orlop.store.pending import begin, pending_at
from orlop.tools.stored_values import StoredValues, regions

__all__ = ["rewrite"]

_CHUNK_BYTES = 256 << 20


class _Planner(DefaultSavePlanner):
    """Gives the writer each chunk when it is to be written, and not before."""

    def __init__(self, values: StoredValues, part: Callable[[str, Tensor], Tensor]) -> None:
        super().__init__()
        self._values = values
        self._part = part

    def resolve_data(self, write_item: WriteItem) -> Any:
        leaf = write_item.index.fqn
        if write_item.tensor_data is None:
            content = io.BytesIO()
            torch.save(self._values.value(leaf), content)
            return content
        chunk = write_item.tensor_data.chunk
        box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
        return self._part(leaf, self._values.tensor(leaf, box))


def rewrite(
    values: StoredValues,
    leaves: Sequence[str],
    dtypes: Mapping[str, str],
    target: Path,
    only: Sequence[str],
    part: Callable[[str, Tensor], Tensor],
) -> int:
    """Write the leaves as a new checkpoint.

    Args:
        values: The checkpoint.
        leaves: Which of its leaves.
        dtypes: What each tensor is written in.
        target: Where the new one appears, whole or not at all.
        only: The parts that were chosen; all when it is empty.
        part: Makes a region as it is to be written.

    Returns:
        How many leaves were written.
    """
    aliases = _aliases(values, leaves)
    items = [item for leaf in leaves if leaf not in aliases for item in _items(values, leaf, dtypes)]
    planner = _Planner(values, part)
    pending = pending_at(target, begin(target))
    try:
        # One thread: one chunk in memory.
        manifest = values.opened.manifest
        writer = Writer(pending.directory, num_threads=1, manifest=manifest is not None)
        writer.set_up_storage_writer(True)
        plan = writer.prepare_local_plan(SavePlan(items))
        (plan,) = writer.prepare_global_plan([plan])
        results = writer.write_data(plan, planner).wait()
        writer.finish(_metadata(values, leaves, items, aliases), with_aliases([results], aliases))
        if manifest is None:
            # Without knowing which state is absent, a manifest would say too much.
            publish.publish(Path(pending.path), target)
        else:
            pending.publish(_manifest(manifest, only, writer.digests, is_cast=_is_cast(values, dtypes)))
    except BaseException:
        pending.discard()
        raise
    return len(leaves)


def _aliases(values: StoredValues, leaves: Sequence[str]) -> dict[str, str]:
    """Leaves whose bytes are another's: each with that other, the first of them."""
    firsts: dict[tuple[Extent, ...], str] = {}
    aliases: dict[str, str] = {}
    for leaf in leaves:
        entry = values.catalog.leaves[leaf]
        if entry is not None and entry.chunks:
            places = [values.catalog.extents.get((leaf, box.offsets)) for box in entry.chunks]
            known = tuple(place for place in places if place is not None)
            first = firsts.setdefault(known, leaf) if len(known) == len(places) else leaf
            if first != leaf:
                aliases[leaf] = first
    return aliases


def _items(values: StoredValues, leaf: str, dtypes: Mapping[str, str]) -> Iterator[WriteItem]:
    entry = values.catalog.leaves[leaf]
    if entry is None:
        yield WriteItem(index=MetadataIndex(leaf), type=WriteItemType.BYTE_IO)
        return
    properties = TensorProperties(dtype=getattr(torch, dtypes[leaf]), requires_grad=entry.requires_grad)
    boxes = list(regions(entry, _CHUNK_BYTES)) or [Box((0,) * len(entry.sizes), entry.sizes)]
    for number, box in enumerate(boxes):
        chunk = ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))
        yield WriteItem(
            index=MetadataIndex(leaf, torch.Size(box.offsets), number),
            type=WriteItemType.SHARD if len(boxes) > 1 else WriteItemType.TENSOR,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(entry.sizes)),
        )


def _metadata(
    values: StoredValues, leaves: Sequence[str], items: Iterable[WriteItem], aliases: Mapping[str, str]
) -> Any:
    entries: dict[str, Any] = {}
    for item in items:
        data = item.tensor_data
        if data is None:
            entries[item.index.fqn] = BytesStorageMetadata()
        elif item.index.fqn in entries:
            entries[item.index.fqn].chunks.append(data.chunk)
        else:
            entries[item.index.fqn] = TensorStorageMetadata(
                properties=data.properties, size=data.size, chunks=[data.chunk]
            )
    entries.update({alias: entries[first] for alias, first in aliases.items()})
    paths = values.catalog.paths
    return compat.dcp_metadata(
        None,
        state_dict_metadata=entries,
        planner_data=None if paths is None else {leaf: paths[leaf] for leaf in leaves if leaf in paths},
    )


def _is_cast(values: StoredValues, dtypes: Mapping[str, str]) -> bool:
    return any(values.entry(leaf).dtype != dtype for leaf, dtype in dtypes.items())


def _manifest(manifest: Manifest, only: Sequence[str], digests: dict[str, str], *, is_cast: bool) -> Manifest:
    """What the old manifest says that still holds."""
    changes: dict[str, Any] = {"digests": digests}
    if only and "model" not in only:
        changes["aliases"] = {}
    if is_cast:
        changes["fingerprint"] = None
    if only:
        for name in (
            "optimizer_classes",
            "absent",
            "state_keys",
            "uneven",
            "group_firsts",
            "group_keys",
            "parts",
        ):
            changes[name] = {
                label: value for label, value in getattr(manifest, name).items() if label in only
            }
        if manifest.fingerprint is not None and not is_cast:
            kept = {
                leaf: digest
                for leaf, digest in manifest.fingerprint.items()
                if leaf.partition(".")[0] in only
            }
            changes["fingerprint"] = kept
    return manifest.model_copy(update=changes)
