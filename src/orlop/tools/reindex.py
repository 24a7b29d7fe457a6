"""`convert --in-place-index`: orlop's indexes beside the data files of a checkpoint that has none.

Owns the making of an index from records that are there. Data files and metadata are not touched. Must not know torch.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable

from orlop.dcp.archive import Unusual
from orlop.dcp.boxes import Box
from orlop.dcp.catalog import Catalog, Extent
from orlop.dcp.checksums import BlockCrcs, pack
from orlop.dcp.index import IndexRecord, index_name, render_index
from orlop.dcp.source import from_record
from orlop.errors import CheckpointCorrupt, CheckpointMismatch
from orlop.store.directory import RangedData
from orlop.tools.check import check_checkpoint
from orlop.tools.opened import Opened
from orlop.wording import counted

__all__ = ["index_in_place"]

_STEP_BYTES = 1 << 20


def index_in_place(
    checkpoint: str | os.PathLike[str], on_bytes: Callable[[int, int], None] | None = None
) -> list[str]:
    """Add the missing indexes, after a check that everything is sound.

    Args:
        checkpoint: Any DCP directory.
        on_bytes: Told of the check's progress: bytes done, bytes in all.

    Returns:
        The names of the new files.

    Raises:
        CheckpointMismatch: The check has findings; an index would make damage look right. Nothing was written.
        CheckpointError: The checkpoint can't be read.
    """
    faults = [
        finding for finding in check_checkpoint(checkpoint, on_bytes=on_bytes).findings if finding.is_fault
    ]
    if faults:
        raise CheckpointMismatch(
            f"the check found {counted(len(faults), 'fault')}, so nothing was indexed",
            where=str(checkpoint),
            found=str(faults[0]),
            todo="orlop verify shows all of them",
        )
    opened = Opened(checkpoint)
    catalog = opened.catalog
    by_file: defaultdict[str, dict[Extent, tuple[str, tuple[int, ...] | None]]] = defaultdict(dict)
    for index, extent in catalog.extents.items():
        by_file[extent.path].setdefault(extent, index)
    added: list[str] = []
    for path, extents in sorted(by_file.items()):
        if opened.contents.index(path) is not None:
            continue
        with opened.open(path) as file:
            ordered = sorted(extents, key=lambda extent: extent.offset)
            records = [_record(file, catalog, extents[extent], extent) for extent in ordered]
            content = render_index(path, file.size, records)
        opened.directory.replace(index_name(path), content)
        added.append(index_name(path))
    return added


def _record(
    file: RangedData, catalog: Catalog, index: tuple[str, tuple[int, ...] | None], extent: Extent
) -> IndexRecord:
    leaf, offsets = index
    entry = catalog.leaves.get(leaf)
    box: Box | None = None
    dtype: str | None = None
    data = (extent.offset, extent.nbytes)
    if entry is not None and offsets is not None:
        box = next(chunk for chunk in entry.chunks if chunk.offsets == offsets)
        if not extent.transforms:
            try:
                source = from_record(
                    lambda at, count: file.read(extent.offset + at, count),
                    leaf,
                    extent,
                    box.sizes,
                    entry.dtype,
                    f"{leaf} in {extent.path}",
                )
                dtype, data = entry.dtype, (source.at, source.nbytes)
            except Unusual:
                pass  # torch's own loader reads it; the index covers the record whole
    return IndexRecord(
        leaf=leaf,
        dtype=dtype,
        box=box,
        record=(extent.offset, extent.nbytes),
        data=data,
        checksums=pack(_crcs(file, *data)),
    )


def _crcs(file: RangedData, start: int, nbytes: int) -> list[int]:
    blocks = BlockCrcs()
    done = 0
    while done < nbytes:
        part = file.read(start + done, min(_STEP_BYTES, nbytes - done))
        if not part:
            raise CheckpointCorrupt("a file ends early", where=str(file))
        blocks.add(memoryview(part))
        done += len(part)
    return blocks.crcs()
