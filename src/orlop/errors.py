"""The exceptions that orlop raises, as one tree.

    OrlopError
    ├─ CheckpointError
    │  ├─ CheckpointNotFound      (FileNotFoundError too) nothing at that path
    │  ├─ CheckpointExists        (FileExistsError too)   a finished checkpoint is never written over
    │  ├─ CheckpointIncomplete    partial directory, missing file, uncovered box
    │  ├─ CheckpointCorrupt       checksum, truncation, unreadable record
    │  ├─ CheckpointUnsafe        content outside the allow-list; names the global
    │  ├─ CheckpointMismatch      (ValueError too) keys, shapes, dtypes, groups differ from the live objects
    │  ├─ RootNotShared           a rank doesn't see the directory that the coordinator made
    │  └─ StorageFull             the checkpoint needs more space than there is; nothing was published
    ├─ HostMemoryError            (MemoryError too) the arena is larger than this host can give
    ├─ OptimizerRefused           (TypeError too)  a class, option, parameter or gradient orlop can't step exactly
    ├─ ParameterReplaced          (RuntimeError too) the model's parameters are not the optimizer's any more
    ├─ RankFailed                 (RuntimeError too) another rank failed with an error that is not orlop's
    ├─ StateNotReady              (RuntimeError too) step or save after a failed load or a torn step
    └─ StorageRefused             (OSError too) the system lets nothing be read or written at that path

Every error says what happened, where (leaf, file, rank), what was expected and found, and what to do: the
message holds it as text, the attributes hold it for programs. Owns no behaviour; imports nothing of orlop.
"""

from __future__ import annotations


class OrlopError(Exception):
    """The root of every error that orlop raises on purpose.

    Args:
        what: One sentence: what happened.
        where: The leaf, file, parameter or rank that it is about.
        expected: What orlop looked for.
        found: What was there instead.
        todo: What the reader can do about it.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        expected: str | None = None,
        found: str | None = None,
        todo: str | None = None,
    ) -> None:
        self.what = what
        self.where = where
        self.expected = expected
        self.found = found
        self.todo = todo
        super().__init__(what, where, expected, found, todo)

    def __str__(self) -> str:
        parts = [self.what]
        for label, text in (("where", self.where), ("expected", self.expected), ("found", self.found)):
            if text is not None:
                parts.append(f"{label}: {text}")
        if self.todo is not None:
            parts.append(f"what to do: {self.todo}")
        return "\n  ".join(parts)

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process boundaries (gathers, pools): keyword-only fields would be lost by the default.
        return _rebuild, (type(self), self.what, self.where, self.expected, self.found, self.todo)


def _rebuild(
    kind: type[OrlopError],
    what: str,
    where: str | None,
    expected: str | None,
    found: str | None,
    todo: str | None,
) -> OrlopError:
    return kind(what, where=where, expected=expected, found=found, todo=todo)


class CheckpointError(OrlopError):
    """Something about a checkpoint."""


class CheckpointNotFound(CheckpointError, FileNotFoundError):
    """There is no checkpoint at that path."""


class CheckpointExists(CheckpointError, FileExistsError):
    """A finished checkpoint stands there already, and is never written over in place."""


class CheckpointIncomplete(CheckpointError):
    """A partial directory, a missing file, or a region of a tensor that no file holds."""


class CheckpointCorrupt(CheckpointError):
    """A checksum, a truncation or a record that can't be read."""


class CheckpointUnsafe(CheckpointError):
    """The checkpoint holds content outside the allow-list; nothing of it was executed."""


class CheckpointMismatch(CheckpointError, ValueError):
    """Keys, shapes, dtypes or groups differ from the live objects; nothing was changed."""


class RootNotShared(CheckpointError):
    """A rank doesn't see the directory that the coordinator made for the checkpoint; nothing was saved."""


class StorageFull(CheckpointError):
    """The checkpoint needs more space than its file system has left; nothing was published or removed."""


class HostMemoryError(OrlopError, MemoryError):
    """The host can't give the memory that the optimizer state needs; nothing was allocated."""


class OptimizerRefused(OrlopError, TypeError):
    """An optimizer class, option, parameter or gradient that orlop can't step exactly."""


class ParameterReplaced(OrlopError, RuntimeError):
    """The model's parameters are not the objects that the optimizer holds."""


class RankFailed(OrlopError, RuntimeError):
    """A rank failed with an error that is not one of orlop's; this is raised on every rank."""


class StateNotReady(OrlopError, RuntimeError):
    """The live state is half old, half new; load a checkpoint before stepping or saving."""


class StorageRefused(OrlopError, OSError):
    """The operating system lets nothing be read or written at a path: permissions, or something else stands there."""
