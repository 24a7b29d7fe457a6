"""Between a `Catalog` and torch's own metadata classes.

Owns the translation. Must not know files or rules.
"""

from __future__ import annotations

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from orlop import compat
from orlop.dcp.boxes import Box
from orlop.dcp.catalog import Catalog, Extent, TensorEntry

__all__ = ["dtype_name", "from_torch", "to_torch"]


def dtype_name(dtype: torch.dtype) -> str:
    """Torch's name for a dtype, without its module: `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def to_torch(catalog: Catalog) -> Metadata:
    """The same contents in torch's own classes, as `pickle.load` of the file would give them."""
    metadata: Metadata = compat.dcp_metadata(
        catalog.version,
        state_dict_metadata={leaf: _entry(entry) for leaf, entry in catalog.leaves.items()},
        planner_data=catalog.paths,
        storage_data={
            MetadataIndex(leaf, offset): compat.storage_info(
                extent.path, extent.offset, extent.nbytes, extent.transforms
            )
            for (leaf, offset), extent in catalog.extents.items()
        },
        storage_meta=StorageMeta(),
    )
    return metadata


def _entry(entry: TensorEntry | None) -> TensorStorageMetadata | BytesStorageMetadata:
    if entry is None:
        return BytesStorageMetadata()
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=getattr(torch, entry.dtype), requires_grad=entry.requires_grad),
        size=torch.Size(entry.sizes),
        chunks=[
            ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))
            for box in entry.chunks
        ],
    )


def from_torch(metadata: Metadata) -> Catalog:
    """The contents that torch's own metadata tells of; it is taken as right."""
    catalog = Catalog(paths=metadata.planner_data, version=getattr(metadata, "version", None))
    for leaf, entry in metadata.state_dict_metadata.items():
        catalog.leaves[leaf] = _from_entry(entry) if isinstance(entry, TensorStorageMetadata) else None
    for index, info in metadata.storage_data.items():
        offset = None if index.offset is None else tuple(index.offset)
        catalog.extents[index.fqn, offset] = Extent(
            path=info.relative_path, offset=info.offset, nbytes=info.length
        )
    return catalog


def _from_entry(entry: TensorStorageMetadata) -> TensorEntry:
    return TensorEntry(
        dtype=dtype_name(entry.properties.dtype),
        sizes=tuple(entry.size),
        chunks=tuple(Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks),
        requires_grad=entry.properties.requires_grad,
    )
