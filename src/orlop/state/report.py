"""What a load found and did: findings, one for each leaf, and the report that holds them.

Owns the verdicts' words and how a report reads. Must not know how anything was decided.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from orlop.errors import CheckpointIncomplete, CheckpointMismatch

__all__ = ["Finding", "GroupDifference", "LoadReport", "Verdict", "faults", "require_no_faults"]

Verdict = Literal[
    "loaded",
    "widened",  # loaded into a dtype that holds every value of the saved one
    "cast",  # loaded into a narrower dtype, as the policy allows
    "absent",  # the parameter never stepped before the save: it has a fresh optimizer's state now
    "reset",  # damaged, and given a fresh optimizer's state, as the policy allows
    "kept",  # not in the checkpoint: the live value stays, as the policy (or a save without frozen ones) allows
    "ignored",  # in the checkpoint, not wanted here, and the policy or its own kind allows that
    "through",  # loaded through the object's own load_state_dict, since that has hooks
    "missing",
    "unexpected",
    "partial",
    "layout",
    "kind",
    "shape",
    "dtype",
    "uncovered",
]
_FAULTS = frozenset({"missing", "unexpected", "partial", "layout", "kind", "shape", "dtype", "uncovered"})
_SHOWN_FAULTS = 200
_SHOWN_ROWS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of a report.

    Attributes:
        verdict: What was found or done.
        leaf: The leaf's key, or the common prefix of a parameter's state.
        detail: What was expected and found, where that is not plain from the verdict.
    """

    verdict: Verdict
    leaf: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.verdict}: {self.leaf}" + (f" ({self.detail})" if self.detail else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDifference:
    """A hyperparameter that the checkpoint changed.

    Attributes:
        group: The optimizer's name and the group's index, e.g. `optimizer[0]`.
        key: The hyperparameter.
        live: Its value before the load, as text.
        saved: Its value in the checkpoint, as text.
    """

    group: str
    key: str
    live: str
    saved: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What a load found and did on this rank.

    Attributes:
        findings: One for each leaf, in the order in which they were looked at.
        differences: The hyperparameters that were changed.
        seconds: Wall time of the whole load.
        bytes_needed: Bytes of this rank's tensors that were filled.
    """

    findings: tuple[Finding, ...]
    differences: tuple[GroupDifference, ...] = ()
    seconds: float = 0.0
    bytes_needed: int = 0

    @property
    def counts(self) -> dict[Verdict, int]:
        """How many findings each verdict has, in the verdicts' order."""
        counted = Counter(finding.verdict for finding in self.findings)
        return {verdict: counted[verdict] for verdict in get_args(Verdict) if counted[verdict]}

    def of(self, *verdicts: Verdict) -> list[Finding]:
        """The findings with one of these verdicts."""
        return [finding for finding in self.findings if finding.verdict in verdicts]

    def __str__(self) -> str:
        lines = [f"loaded {self.bytes_needed / 2**20:,.1f} MiB in {self.seconds:.2f} s"]
        for verdict, count in self.counts.items():
            lines.append(f"  {verdict:<11}{count:>7}")
            if verdict != "loaded":
                lines += [f"    {f.leaf} {f.detail}".rstrip() for f in self.of(verdict)[:_SHOWN_ROWS]]
        lines += [f"  {d.group} {d.key}: {d.live} -> {d.saved}" for d in self.differences]
        return "\n".join(lines)


def faults(findings: Iterable[Finding]) -> list[Finding]:
    """The findings that a load can't go on with."""
    return [finding for finding in findings if finding.verdict in _FAULTS]


def require_no_faults(found: Iterable[Finding], where: str) -> None:
    """Raise when any finding is a fault.

    Raises:
        CheckpointIncomplete: The only faults are regions that no file holds.
        CheckpointMismatch: Keys, shapes, dtypes or groups differ; all are listed.
    """
    wrong = list(dict.fromkeys(faults(found)))
    if not wrong:
        return
    uncovered = all(finding.verdict == "uncovered" for finding in wrong)
    kind = CheckpointIncomplete if uncovered else CheckpointMismatch
    counts = Counter(finding.verdict for finding in wrong)
    lines = "".join(f"\n    {finding}" for finding in wrong[:_SHOWN_FAULTS])
    more = f"\n    and {len(wrong) - _SHOWN_FAULTS} more" if len(wrong) > _SHOWN_FAULTS else ""
    raise kind(
        "the checkpoint does not fit the live objects; nothing was changed: "
        + ", ".join(f"{count} {verdict}" for verdict, count in counts.items()),
        where=where,
        found=lines + more,
        todo="load it into the model and optimizer that it was saved from, or say in the LoadPolicy what may differ",
    )
