"""Which saved param group is which live one: by the names of their parameters, never by position.

Pure, over names. Must not know the groups' values, files or ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from orlop.state.policy import LoadPolicy
from orlop.state.report import Finding, Verdict
from orlop.wording import counted

__all__ = ["Pairing", "pair_groups"]

_SHOWN = 4
_NAMED = 100
_BY_POSITION = (
    "they name parameters by their position in an optimizer, as optimizer.state_dict() does; weights alone load with "
    "load_states=False, load_args=False; to have the state as well, read it with dcp.load into the state_dict() of an "
    "optimizer that is built as then, and give it to its load_state_dict; save by orlop from then on, or by torch's "
    "get_optimizer_state_dict"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """Which saved group each live one takes its values from.

    Attributes:
        order: For each live group the saved group's index, or None for one that keeps its own values; None in place of
            all of them where the groups do not match.
        findings: What one side lacks, and what does not match.
    """

    order: tuple[int | None, ...] | None
    findings: tuple[Finding, ...] = ()


def pair_groups(
    live: Sequence[Sequence[str]], saved: Sequence[Sequence[Any]], leaf: str, policy: LoadPolicy
) -> Pairing:
    """Pair the groups that hold the same parameters, among those that both sides know.

    Args:
        live: The names in each live group.
        saved: Those in each saved one, or numbers: positions in the optimizer that was saved.
        leaf: What to call the groups: `optimizer.param_groups`.
        policy: Whether parameters may be new here (`allow_missing`) or gone (`allow_unexpected`).
    """
    here = {name for names in live for name in names}
    there = {str(name) for names in saved for name in names}
    has_numbers = any(isinstance(name, int) for names in saved for name in names)
    if has_numbers or (there and all(map(str.isdigit, there)) and not any(map(str.isdigit, here))):
        found = Finding(verdict="layout", leaf=leaf, detail=_BY_POSITION)
        return Pairing(order=None, findings=(found,))
    findings = []
    if new := [name for names in live for name in names if name not in there]:
        verdict: Verdict = "kept" if policy.allow_missing else "missing"
        findings.append(
            Finding(verdict=verdict, leaf=leaf, detail=f"not in its groups: {_listed(new, _NAMED)}")
        )
    if gone := [name for names in saved for name in names if name not in here]:
        verdict = "ignored" if policy.allow_unexpected else "unexpected"
        findings.append(
            Finding(verdict=verdict, leaf=leaf, detail=f"only in its groups: {_listed(gone, _NAMED)}")
        )
    order = _pair([_known(names, there) for names in live], [_known(names, here) for names in saved])
    if order is None:
        detail = f"param groups do not match; here:{_table(live)}\n      in the checkpoint:{_table(saved)}"
        findings.append(Finding(verdict="groups", leaf=leaf, detail=detail))
    return Pairing(order=order, findings=tuple(findings))


def _known(names: Sequence[str], known: set[str]) -> frozenset[str] | None:
    """The names that the other side has, too; None for a group of which it has none."""
    common = frozenset(name for name in names if name in known)
    return common if common or not names else None


def _pair(
    live: Sequence[frozenset[str] | None], saved: Sequence[frozenset[str] | None]
) -> tuple[int | None, ...] | None:
    free = {index: names for index, names in enumerate(saved) if names is not None}
    order: list[int | None] = []
    for names in live:
        partner = next((index for index, others in free.items() if others == names), None)
        if partner is None and names:
            return None
        order.append(partner)
        free.pop(partner, None)  # type: ignore[arg-type]
    return None if free else tuple(order)


def _listed(names: Sequence[str], count: int) -> str:
    return ", ".join(names[:count]) + (", …" if len(names) > count else "")


def _table(groups: Sequence[Sequence[str]]) -> str:
    rows = []
    for index, names in enumerate(groups):
        rows.append(f"\n        group {index}: {counted(len(names), 'parameter')}: {_listed(names, _SHOWN)}")
    return "".join(rows) or " none"
