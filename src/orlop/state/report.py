"""What a load found and did: findings, one for each leaf, and the report that holds them.

Owns the verdicts' words and how a report reads. Must not know how anything was decided.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from orlop.errors import CheckpointIncomplete, CheckpointMismatch
from orlop.wording import counted

__all__ = [
    "Fact",
    "Finding",
    "GroupDifference",
    "LoadReport",
    "Verdict",
    "faults",
    "name_ranks",
    "require_no_faults",
]

Verdict = Literal[
    "loaded",
    "widened",  # loaded into a dtype that holds every value of the saved one
    "cast",  # loaded into a narrower dtype, as the policy allows
    "absent",  # the parameter never stepped before the save: it has a fresh optimizer's state now
    "fresh",  # no optimizer in the checkpoint, which holds weights only: all state starts afresh
    "reset",  # damaged, and given a fresh optimizer's state, as the policy allows
    "merged",  # its scalars differed by rank on the saved topology; here it has the largest, as the policy allows
    "kept",  # not in the checkpoint: the live value stays, as the policy allows
    "left out",  # not saved, on purpose: the live value stays
    "afresh",  # a part of another number of ranks: the live one stays, as the policy allows
    "skipped",  # a part that the policy names: the live one stays
    "ignored",  # in the checkpoint, not wanted here, and the policy or its own kind allows that
    "through",  # loaded through the object's own load_state_dict, since that has hooks
    # From here on, faults.
    "weights only",  # a run would go on by itself with fresh state
    "class",  # another optimizer class wrote the state
    "layout",  # not one name matches
    "groups",  # param groups are cut otherwise
    "missing",
    "lost",  # the manifest says that it was saved, and it is not there
    "unexpected",
    "missing part",  # a part of the run that the checkpoint lacks
    "unexpected part",  # a run that goes on by itself would leave a part of the checkpoint behind
    "other ranks",  # a part that each rank has its own of, and there is another number of ranks
    "unfit",  # a part can't take its state
    "refused",  # what the model's own load_state_dict raised
    "no part",  # the policy skips what nobody knows
    "partial",
    "uneven",  # state differed by rank, and the ranks are cut otherwise now
    "untied",  # two tensors in the checkpoint that are one here
    "kind",
    "shape",
    "dtype",
    "uncovered",
]
_VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
_FAULTS = frozenset(_VERDICTS[_VERDICTS.index("weights only") :])
_ADVICE: dict[Verdict, str] = {
    "weights only": "to start from weights: LoadPolicy(allow_weights_only=True)",
    "class": "to change the optimizer, load with load_states=False and load_args=False; if it is the same rule under "
    "another name: LoadPolicy(allow_other_class=True)",
    "groups": "build the optimizer with the groups of the run that saved it, or load with load_args=False",
    "missing": "to keep live values of what is missing: LoadPolicy(allow_missing=True)",
    "unexpected": "to ignore what is not wanted here: LoadPolicy(allow_unexpected=True)",
    "unexpected part": "give the engine the part that it was saved with",
    "other ranks": "resume on as many ranks as saved it; to start such parts afresh: "
    "LoadPolicy(allow_other_ranks=True)",
    "no part": "name parts in skip_parts as the engine or the checkpoint does",
    "untied": "to load the first of two tensors: LoadPolicy(allow_unexpected=True)",
    "partial": "to give a parameter fresh state: LoadPolicy(reset_damaged=(its name,))",
    "uneven": "to take the largest scalars: LoadPolicy(merge_uneven=True)",
    "dtype": "to cast all the same: LoadPolicy(cast_dtypes=True)",
    "lost": "take another checkpoint; to give a parameter fresh state: LoadPolicy(reset_damaged=(its name,))",
    "uncovered": "take another checkpoint; to give a parameter fresh state: LoadPolicy(reset_damaged=(its name,))",
}
# Parts that a policy can leave as they are here.
_SKIPPABLE = frozenset({"missing part", "unexpected part", "unfit"})
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
    """A hyperparameter that differs between the checkpoint and the live group.

    Attributes:
        group: The optimizer's name and the group's index, e.g. `optimizer[0]`.
        key: The hyperparameter.
        live: Its value before the load, as text.
        saved: Its value in the checkpoint, as text.
        taken: Whether the saved value is the live one now (`load_args`).
    """

    group: str
    key: str
    live: str
    saved: str
    taken: bool = True

    def __str__(self) -> str:
        change = f"{self.live} -> {self.saved}" if self.taken else f"{self.live} kept, {self.saved} was saved"
        return f"{self.group} {self.key}: {change}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """Something that was recorded at the save, and what it is now.

    Attributes:
        name: `world size`, `mesh`, `torch`, `orlop`, or `class of <optimizer>`.
        recorded: As text; None where the checkpoint does not tell.
        live: As text.
    """

    name: str
    recorded: str | None
    live: str

    @property
    def differs(self) -> bool:
        """Whether both are known and not the same."""
        return self.recorded is not None and self.recorded != self.live


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What a load found and did on this rank.

    Attributes:
        findings: One for each leaf, in the order in which they were looked at.
        differences: The hyperparameters that differed, and which side won.
        facts: What was recorded at the save against what is live.
        scheduled_rates: Where the live learning rates were kept although a scheduler was loaded (`load_args=False`):
            for each group that it drives the rate of the live schedule at the saved place; None where that can't be
            told.
        seconds: Wall time of the whole load.
        bytes_needed: Bytes of this rank's tensors that were filled.
        bytes_read: Bytes of the records that this rank read for them.
        unchecked: Leaves whose bytes could not be compared with a checksum, each with the reason.
        fallbacks: Leaves whose record has an unusual form, so that torch's own loader read it; with the reason.
    """

    findings: tuple[Finding, ...]
    differences: tuple[GroupDifference, ...] = ()
    seconds: float = 0.0
    bytes_needed: int = 0
    bytes_read: int = 0
    unchecked: Mapping[str, str] = field(default_factory=dict)
    fallbacks: Mapping[str, str] = field(default_factory=dict)
    facts: tuple[Fact, ...] = ()
    scheduled_rates: tuple[float | None, ...] = ()

    @property
    def counts(self) -> dict[Verdict, int]:
        """How many findings each verdict has, in the verdicts' order."""
        counted = Counter(finding.verdict for finding in self.findings)
        return {verdict: counted[verdict] for verdict in _VERDICTS if counted[verdict]}

    def of(self, *verdicts: Verdict) -> list[Finding]:
        """The findings with one of these verdicts."""
        return [finding for finding in self.findings if finding.verdict in verdicts]

    def __str__(self) -> str:
        sizes = f"{self.bytes_needed / 2**20:,.1f} MiB ({self.bytes_read / 2**20:,.1f} MiB read)"
        lines = [f"loaded {sizes} in {self.seconds:.2f} s"]
        for leaves, what in ((self.unchecked, "not checked"), (self.fallbacks, "by torch's loader")):
            if leaves:
                leaf, reason = next(iter(leaves.items()))
                lines.append(f"  {what}: {counted(len(leaves), 'leaf', 'leaves')}, such as {leaf}: {reason}")
        for verdict, count in self.counts.items():
            lines.append(f"  {verdict:<11}{count:>7}")
            if verdict != "loaded":
                lines += [f"    {f.leaf} {f.detail}".rstrip() for f in self.of(verdict)[:_SHOWN_ROWS]]
        lines += [f"  {difference}" for difference in self.differences]
        lines += [f"  {f.name}: {f.recorded} when saved, {f.live} now" for f in self.facts if f.differs]
        return "\n".join(lines)


def faults(findings: Iterable[Finding]) -> list[Finding]:
    """The findings that a load can't go on with."""
    return [finding for finding in findings if finding.verdict in _FAULTS]


def name_ranks(everyone: Sequence[Iterable[Finding]]) -> list[Finding]:
    """All ranks' findings, each once; one that is not every rank's says whose it is."""
    holders: dict[Finding, list[int]] = {}
    for rank, findings in enumerate(everyone):
        for finding in findings:
            holders.setdefault(finding, []).append(rank)
    return [_with_ranks(finding, ranks, len(everyone)) for finding, ranks in holders.items()]


def _with_ranks(finding: Finding, ranks: Sequence[int], world_size: int) -> Finding:
    whose = f"rank {', '.join(map(str, ranks))}"
    if finding.verdict == "uncovered":
        return replace(finding, detail=f"{finding.detail}; needed by {whose}")
    if len(ranks) == world_size:
        return finding
    return replace(finding, detail=f"{finding.detail}; on {whose}" if finding.detail else f"on {whose}")


def require_no_faults(found: Iterable[Finding], where: str) -> None:
    """Raise when any finding is a fault.

    Raises:
        CheckpointIncomplete: The only faults are leaves or regions that were saved and that no file holds.
        CheckpointMismatch: Keys, shapes, dtypes or groups differ; all are listed.
    """
    wrong = list(dict.fromkeys(faults(found)))
    if not wrong:
        return
    gone = all(finding.verdict in ("uncovered", "lost") for finding in wrong)
    kind = CheckpointIncomplete if gone else CheckpointMismatch
    counts = Counter(finding.verdict for finding in wrong)
    lines = "".join(f"\n    {finding}" for finding in wrong[:_SHOWN_FAULTS])
    more = f"\n    and {len(wrong) - _SHOWN_FAULTS} more" if len(wrong) > _SHOWN_FAULTS else ""
    raise kind(
        "the checkpoint does not fit the live objects; nothing was changed: "
        + ", ".join(f"{count} {verdict}" for verdict, count in counts.items()),
        where=where,
        found=lines + more,
        todo=_advise(wrong, counts),
    )


def _advise(wrong: Sequence[Finding], counts: Mapping[Verdict, int]) -> str:
    advice = [_ADVICE[verdict] for verdict in _ADVICE if counts[verdict]]
    if not counts.keys() <= {*_SKIPPABLE, "other ranks", "no part"}:
        advice.insert(0, "load it into the model and optimizer that it was saved from")
    parts = sorted({finding.leaf for finding in wrong if finding.verdict in _SKIPPABLE})
    if parts:
        names = ", ".join(map(repr, parts))
        advice.append(f"to leave these parts as they are here: LoadPolicy(skip_parts={{{names}}})")
    if any("LoadPolicy(" in each for each in advice):
        advice.append("a LoadPolicy is given as policy= to load_dcp, CheckpointStore.resume or Trainer")
    return "; ".join(advice)
