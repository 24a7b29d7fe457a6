"""The small files of a checkpoint, opened as data: `.metadata` or its sealed twin, the indexes, the manifest.

Owns which of them is believed: what the manifest notes is compared with what is there. Must not know torch, plans or
targets.
"""

from __future__ import annotations

from orlop.dcp.catalog import Catalog, from_json
from orlop.dcp.collector import without_collection
from orlop.dcp.index import FileIndex, index_name, parse_index, unseal_as
from orlop.dcp.metadata import parse_metadata
from orlop.errors import CheckpointCorrupt, CheckpointIncomplete, CheckpointNotFound
from orlop.store.directory import Directory
from orlop.store.manifest import (
    CATALOG_NAME,
    MANIFEST_NAME,
    Manifest,
    lost_manifest,
    parse_manifest,
    promises_manifest,
)
from orlop.store.sealed import digest

__all__ = ["CATALOG_FORMAT", "CATALOG_NAME", "METADATA_NAME", "Contents"]

METADATA_NAME = ".metadata"
CATALOG_FORMAT = "orlop-metadata"


class Contents:
    """What a checkpoint's directory says of itself; each small file is read once, when it is first needed."""

    def __init__(self, directory: Directory) -> None:
        self.directory = directory
        self._indexes: dict[str, FileIndex | None] = {}
        self._manifest: Manifest | None = None
        self._looked_for_manifest = False
        self._ignores_manifest = False

    @property
    def manifest(self) -> Manifest | None:
        """`orlop.json`, if there is one.

        Raises:
            CheckpointIncomplete: There was one, or should have been.
            CheckpointCorrupt: It is damaged.
            CheckpointError: A newer orlop wrote it.
        """
        if not self._looked_for_manifest:
            data = self._optional(MANIFEST_NAME)
            where = self.directory.path_of(MANIFEST_NAME)
            if data is None and promises_manifest(self._optional(CATALOG_NAME) or b""):
                raise lost_manifest(where)
            self._manifest = None if data is None else parse_manifest(data, where)
            self._looked_for_manifest = True
        return self._manifest

    def ignore_manifest(self) -> None:
        """From now on none is there, and none is missed: for a tool that has told what is wrong with it."""
        self._looked_for_manifest = self._ignores_manifest = True

    def catalog(self, rank: int | None = None) -> Catalog:
        """What the checkpoint holds.

        Args:
            rank: For a checkpoint that DCP saved without collectives: whose metadata.

        Raises:
            CheckpointNotFound: There is no such directory.
            CheckpointIncomplete: It has no metadata.
            CheckpointUnsafe: The metadata names something outside the allow-list; nothing ran.
            CheckpointCorrupt: It is damaged, or breaks a rule.
        """
        name = METADATA_NAME if rank is None else f"__{rank}{METADATA_NAME}"
        data = self._required_metadata(name)
        sealed = self._optional_sealed(CATALOG_NAME) if rank is None else None
        with without_collection():
            if sealed is None:
                return parse_metadata(data, self.directory.path_of(name))
            content = unseal_as(CATALOG_FORMAT, sealed, self.directory.path_of(CATALOG_NAME))
            if content.get("metadata_digest") != digest(data):
                raise CheckpointCorrupt(
                    "the metadata is not what was written",
                    where=self.directory.path_of(name),
                    expected=f"SHA-256 {content.get('metadata_digest')}",
                    found=digest(data),
                    todo="resume from an older checkpoint; if another program has rewritten this one, remove its "
                    "*.index.json, metadata.json and orlop.json: it is read as a plain DCP checkpoint then",
                )
            return from_json(content, self.directory.path_of(CATALOG_NAME))

    def _required_metadata(self, name: str) -> bytes:
        try:
            return self.directory.read(name)
        except (FileNotFoundError, NotADirectoryError) as error:
            if not self.directory.exists(""):
                raise CheckpointNotFound("there is no checkpoint", where=str(self.directory)) from error
            raise CheckpointIncomplete(
                f"its {name} is missing: it was never finished, or is no DCP checkpoint",
                where=self.directory.path_of(name),
            ) from error

    def index(self, file: str) -> FileIndex | None:
        """A data file's index, if it has one.

        Raises:
            CheckpointIncomplete: The manifest notes one, and it is not there.
            CheckpointCorrupt: It is damaged.
            CheckpointError: A newer orlop wrote it.
        """
        if file not in self._indexes:
            name = index_name(file)
            data = self._optional_sealed(name)
            where = self.directory.path_of(name)
            with without_collection():
                index = None if data is None else parse_index(data, file, where)
            is_missed = index is not None and index.manifest and not self._ignores_manifest
            if is_missed and self.manifest is None:
                raise lost_manifest(self.directory.path_of(MANIFEST_NAME))
            self._indexes[file] = index
        return self._indexes[file]

    def expected_size(self, file: str) -> int | None:
        """How many bytes a data file should have, where index or manifest tell."""
        index = self.index(file)
        if index is not None:
            return index.nbytes
        return self.manifest.files.get(file) if self.manifest is not None else None

    def _optional(self, name: str) -> bytes | None:
        try:
            return self.directory.read(name)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _optional_sealed(self, name: str) -> bytes | None:
        """A sealed file that is as the manifest notes it."""
        data = self._optional(name)
        noted = None if self.manifest is None else self.manifest.digests.get(name)
        if noted is None or (data is not None and digest(data) == noted):
            return data
        if data is None:
            raise CheckpointIncomplete("a file is missing", where=self.directory.path_of(name))
        raise CheckpointCorrupt(
            "a file is not the one that was written",
            where=self.directory.path_of(name),
            expected=f"SHA-256 {noted}",
            found=digest(data),
        )
