"""A scheduler's saved state for live param groups: its lists, one value for each group, in the live groups' order.

Pure. Must not know optimizers, files or ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["GroupOrder", "find_order", "rates_in_place"]

# What schedulers keep one of for each group.
_PER_GROUP = frozenset(
    {"base_lrs", "_last_lr", "lr_lambdas", "max_lrs", "min_lrs", "base_momentums", "max_momentums"}
)
_RATES = frozenset({"base_lrs", "_last_lr"})
# A list of the scheduler that repeats a value of the groups.
_REPEATED = (("base_lrs", "initial_lr"), ("_last_lr", "lr"))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOrder:
    """How the lists of a scheduler are put into the live groups' order.

    Attributes:
        order: For each live group its index among the saved ones; None for one that keeps what it has.
        keeps_rates: The live learning rates stay (`load_args=False`).
    """

    order: Sequence[int | None]
    keeps_rates: bool = False

    def arrange(self, state: Any, live: Any) -> Any:
        """The saved state, with those of chained schedulers inside it, in the live order.

        Args:
            state: The saved state.
            live: The live scheduler's state.
        """
        if isinstance(state, Mapping):
            own = live if isinstance(live, Mapping) else {}
            return {key: self._arrange_entry(key, value, own.get(key)) for key, value in state.items()}
        if isinstance(state, list):
            lives = live if isinstance(live, list) and len(live) == len(state) else [None] * len(state)
            return [self.arrange(item, other) for item, other in zip(state, lives)]
        return state

    def _arrange_entry(self, key: Any, value: Any, live: Any) -> Any:
        if key in _RATES and self.keeps_rates and live is not None:
            return live
        if key in _PER_GROUP and isinstance(value, list) and _reaches(value, self.order):
            kept = live if isinstance(live, list) and len(live) == len(self.order) else value
            return [kept[i] if index is None else value[index] for i, index in enumerate(self.order)]
        return self.arrange(value, live) if key == "_schedulers" else value


def rates_in_place(saved: Any, live: Any, order: Sequence[int | None]) -> tuple[float | None, ...]:
    """Each live group's learning rate where the saved schedule stands: its own base, as far along as the saved one.

    Right for schedules that scale their base, by whatever rule.

    Args:
        saved: The scheduler's saved state.
        live: The live scheduler's, before it takes the saved one.
        order: For each live group its index among the saved ones; None for one that was not saved.

    Returns:
        The rates; None where that can't be told.
    """
    bases, rates, own = _listed(saved, "base_lrs"), _listed(saved, "_last_lr"), _listed(live, "base_lrs")
    if not (_reaches(bases, order) and _reaches(rates, order) and len(own) == len(order)):
        return (None,) * len(order)
    return tuple(
        None if index is None or not bases[index] else own[i] * rates[index] / bases[index]
        for i, index in enumerate(order)
    )


def _reaches(values: Sequence[Any], order: Sequence[int | None]) -> bool:
    return all(index is None or index < len(values) for index in order)


def _listed(state: Any, name: str) -> list[float]:
    """A list of a scheduler's state, or of the first of those chained inside it."""
    if not isinstance(state, Mapping):
        return []
    found = state.get(name)
    if isinstance(found, list):
        return [float(value) for value in found]
    chained = state.get("_schedulers")
    return _listed(chained[0], name) if isinstance(chained, list) and chained else []


def find_order(state: Any, groups: Sequence[Mapping[str, Any]]) -> tuple[int, ...] | None:
    """For each group its index in the scheduler's lists, by the rates that stand in both.

    For layouts that keep no order of groups. Where the lists repeat no rates of the groups (someone set them by hand),
    the groups' own order is taken.

    Args:
        state: The scheduler's saved state.
        groups: The saved groups' values.

    Returns:
        The indices; None where groups with equal rates leave more than one way. There may be more rates than groups;
        where there are fewer, one saved group is several now.
    """
    ways: tuple[int, ...] | None = tuple(range(len(groups)))
    for listed, grouped in _REPEATED:
        theirs = _listed(state, listed)
        ours = [float(group[grouped]) for group in groups if grouped in group]
        is_split = 0 < len(theirs) < len(groups)
        if not is_split and (ours == theirs or Counter(ours) - Counter(theirs)):
            continue
        if len(ours) == len(groups) and all(theirs.count(rate) == 1 for rate in ours):
            return tuple(theirs.index(rate) for rate in ours)
        ways = None
    return ways
