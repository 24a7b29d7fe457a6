"""Whether a checkpoint's pieces fit together: its files, the leaves of its metadata, the records of its indexes.

Owns these rules. Pure: descriptions in, findings out; no data is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from orlop.dcp.catalog import Catalog, Index
from orlop.dcp.index import FileIndex
from orlop.store.manifest import MANIFEST_NAME, Manifest
from orlop.tools.findings import Finding
from orlop.wording import counted

__all__ = ["check_files", "check_indexed", "check_structure"]


def check_files(sizes: Mapping[str, int], manifest: Manifest) -> Iterator[Finding]:
    """The files that the manifest promises, by name and size."""
    for name, nbytes in manifest.files.items():
        there = sizes.get(name)
        if there is None:
            yield Finding(
                kind="incomplete", where=name, what="a file is missing", expected=counted(nbytes, "byte")
            )
        elif there != nbytes:
            yield Finding(
                kind="incomplete" if there < nbytes else "corrupt",
                where=name,
                what="a file has not the size that was written",
                expected=counted(nbytes, "byte"),
                found=counted(there, "byte"),
            )
    for name in sorted(sizes.keys() - manifest.files.keys() - {MANIFEST_NAME}):
        if not name.endswith(".index.json"):  # `convert --in-place-index` adds these later
            yield Finding(kind="unlisted", where=name, what="the manifest doesn't know this file")


def check_structure(catalog: Catalog) -> Iterator[Finding]:
    """Every leaf is covered by chunks, every chunk stands in a file, and nothing else does."""
    expected: set[Index] = set()
    for leaf, entry in catalog.leaves.items():
        if entry is None:
            expected.add((leaf, None))
            continue
        if entry.gap:
            what = "a part of a tensor is in no file"
            yield Finding(kind="incomplete", where=leaf, what=what, found=entry.gap)
        expected.update((leaf, box.offsets) for box in entry.chunks)
    for leaf, offsets in expected - catalog.extents.keys():
        what = "the metadata names no file for a part of a leaf: its save failed half-way"
        yield Finding(kind="incomplete", where=leaf, what=what, found=f"nothing at {offsets}")
    for leaf, offsets in catalog.extents.keys() - expected:
        what = "a file holds a part of a leaf that the metadata doesn't describe"
        yield Finding(kind="corrupt", where=leaf, what=what, found=f"a record at {offsets}")


def check_indexed(catalog: Catalog, indexes: dict[str, FileIndex | None]) -> Iterator[Finding]:
    """Every record that was written is a leaf's."""
    known = {(extent.path, extent.offset) for extent in catalog.extents.values()}
    for name, index in indexes.items():
        for record in index.records if index is not None else ():
            if (name, record.record[0]) not in known:
                what = "the metadata does not know a leaf that was written"
                yield Finding(kind="lost", where=f"{record.leaf} in {name}", what=what)
