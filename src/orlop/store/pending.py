"""A checkpoint that is being written: a partial directory on a file system, or a marked prefix in an object store.

Owns what a save needs to know of either: where each rank writes, and how the whole is published or discarded. Must not
know what is written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from orlop.store import files, publish
from orlop.store.directory import Directory, LocalDirectory
from orlop.store.manifest import MANIFEST_NAME, Manifest, write_manifest
from orlop.store.objects import Url
from orlop.store.remote import RemotePending

__all__ = ["LocalPending", "Pending", "begin", "pending_at"]


class Pending(Protocol):
    """One checkpoint that is being written. `publish` and `discard` are the coordinator's."""

    @property
    def path(self) -> Path | Url:
        """Where it is written."""
        ...

    @property
    def directory(self) -> Directory:
        """The same, as a writer sees it."""
        ...

    def require_visible(self) -> None:
        """Raises RootNotShared when this rank doesn't see what the coordinator began."""
        ...

    def require_space(self, needed: int) -> None:
        """Raises StorageFull when that many bytes of tensors can't fit."""
        ...

    def publish(self, manifest: Manifest) -> None:
        """Makes it a checkpoint, whole and durable, with this manifest and the sizes of its files in it."""
        ...

    def discard(self) -> None:
        """Removes what was written, after a failure."""
        ...


class LocalPending:
    """A checkpoint that is being written into a partial directory beside its final name.

    Args:
        final: Its path when it is published.
        name: Of the partial directory.
    """

    def __init__(self, final: Path, name: str) -> None:
        self.path = final.with_name(name)
        self._final = final

    @property
    def directory(self) -> Directory:
        """See `Pending`."""
        return LocalDirectory(self.path)

    def require_visible(self) -> None:
        """See `Pending`."""
        publish.require_visible(self.path)

    def require_space(self, needed: int) -> None:
        """See `Pending`."""
        publish.require_space(self.path, needed)

    def publish(self, manifest: Manifest) -> None:
        """See `Pending`."""
        sizes = {name: size for name, size in files.file_sizes(self.path).items() if name != MANIFEST_NAME}
        write_manifest(self.path, manifest.model_copy(update={"files": sizes}))
        publish.publish(self.path, self._final)

    def discard(self) -> None:
        """See `Pending`."""
        if self.path.exists():
            publish.discard(self.path)


def begin(final: Path | Url) -> str:
    """Begins a checkpoint that is to appear at `final`; the coordinator calls it once.

    Returns:
        Its signature, for `pending_at` on every rank.

    Raises:
        CheckpointExists: Something is there already.
    """
    return RemotePending.begin(final) if isinstance(final, Url) else publish.begin_partial(final).name


def pending_at(final: Path | Url, signature: str) -> Pending:
    """The checkpoint that the coordinator began, as this rank takes part in it."""
    return RemotePending(final, signature) if isinstance(final, Url) else LocalPending(final, signature)
