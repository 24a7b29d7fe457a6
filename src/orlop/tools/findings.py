"""What a tool found: one `Finding` for each thing, typed, with all that an error would say.

Owns the kinds' words. Must not know how anything was found.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from orlop.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointIncomplete,
    CheckpointNotFound,
    CheckpointUnsafe,
)

__all__ = ["Finding", "Kind", "as_error", "as_plain", "differing", "from_error"]

Kind = Literal[
    "incomplete",  # a file, a record or a region of a tensor is not there
    "corrupt",  # a checksum, a size or a form is wrong
    "unsafe",  # content outside the allow-list; it was not executed
    "unreadable",  # the operating system says so, or a newer orlop wrote it
    "lost",  # the manifest says that it was saved, and it is not there
    "partial",  # one parameter has only some of its optimizer state
    "names",  # optimizer and model have no name in common, or nothing matches
    "missing",  # the model expects it, the checkpoint lacks it
    "unexpected",  # the checkpoint has it, the model doesn't take it
    "shape",
    "dtype",
    "kind",  # a tensor on one side, plain data on the other
    "value",
    "hyperparameter",
    "fingerprint",
    "unchecked",  # carries nothing to check it by
    "unlisted",  # a file that the manifest doesn't know
]
_NOTES: frozenset[Kind] = frozenset({"unchecked", "unlisted"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that a tool found.

    Attributes:
        kind: What sort of thing.
        where: The leaf, the file, or both.
        what: One sentence.
        expected: What should be there, where that is not plain from the sentence.
        found: What is there.
        todo: What the reader can do about it.
        sides: How `expected` and `found` are called: of two checkpoints that are compared, neither is right.
    """

    kind: Kind
    where: str
    what: str
    expected: str = ""
    found: str = ""
    todo: str = ""
    sides: tuple[str, str] = ("expected", "found")

    @property
    def is_fault(self) -> bool:
        """Whether it counts against the checkpoint; a note doesn't."""
        return self.kind not in _NOTES

    def __str__(self) -> str:
        text = f"{self.kind}: {self.where}: {self.what}"
        for side, said in zip(self.sides, (self.expected, self.found)):
            if said:
                text += f"; {side}: {said}"
        return text


def differing(kind: Kind, where: str, what: str, a: str = "", b: str = "") -> Finding:
    """What differs between two checkpoints, A and B.

    Args:
        kind: What sort of thing.
        where: The leaf.
        what: One sentence.
        a: What A has there.
        b: What B has there.
    """
    return Finding(kind=kind, where=where, what=what, expected=a, found=b, sides=("A", "B"))


def as_plain(finding: Finding) -> dict[str, Any]:
    """A finding as JSON data."""
    plain = {**asdict(finding), "is_fault": finding.is_fault}
    for name, side in zip(("expected", "found"), plain.pop("sides")):
        plain[side.lower()] = plain.pop(name)
    return plain


def from_error(error: CheckpointError | OSError, where: str = "") -> Finding:
    """The finding that an error stands for.

    Args:
        error: What was raised.
        where: The place, for an error that names none.
    """
    if not isinstance(error, CheckpointError):
        return Finding(kind="unreadable", where=where, what="it can't be read", found=str(error))
    kinds: tuple[tuple[type[CheckpointError], Kind], ...] = (
        (CheckpointNotFound, "incomplete"),
        (CheckpointIncomplete, "incomplete"),
        (CheckpointCorrupt, "corrupt"),
        (CheckpointUnsafe, "unsafe"),
    )
    return Finding(
        kind=next((kind for cls, kind in kinds if isinstance(error, cls)), "unreadable"),
        where=error.where or where,
        what=error.what,
        expected=error.expected or "",
        found=error.found or "",
        todo=error.todo or "",
    )


def as_error(finding: Finding, others: int = 0) -> CheckpointError:
    """The error that stands for a finding.

    Args:
        finding: A fault.
        others: How many more there are, for the message.
    """
    kinds: dict[Kind, type[CheckpointError]] = {
        "incomplete": CheckpointIncomplete,
        "corrupt": CheckpointCorrupt,
        "lost": CheckpointIncomplete,
        "partial": CheckpointIncomplete,
        "unsafe": CheckpointUnsafe,
    }
    more = f" (and {others} more)" if others else ""
    return kinds.get(finding.kind, CheckpointError)(
        finding.what + more,
        where=finding.where,
        expected=finding.expected or None,
        found=finding.found or None,
        todo=finding.todo or None,
    )
