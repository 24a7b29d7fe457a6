"""A scheduler's saved state for live param groups: its lists, one value for each group, in the live groups' order.

Pure. Must not know optimizers, files or ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["GroupOrder", "find_order"]

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
        num_saved: How many groups were saved.
        keeps_rates: The live learning rates stay (`load_args=False`).
    """

    order: Sequence[int | None]
    num_saved: int
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
        if key in _PER_GROUP and isinstance(value, list) and len(value) == self.num_saved:
            kept = live if isinstance(live, list) and len(live) == len(self.order) else value
            return [kept[i] if index is None else value[index] for i, index in enumerate(self.order)]
        return self.arrange(value, live) if key == "_schedulers" else value


def find_order(state: Any, groups: Sequence[Mapping[str, Any]]) -> tuple[int, ...] | None:
    """For each group its index in the scheduler's lists, by the rates that stand in both.

    For layouts that keep no order of groups. Where the lists repeat no rates of the groups (someone set them by hand),
    the groups' own order is taken.

    Args:
        state: The scheduler's saved state.
        groups: The saved groups' values.

    Returns:
        The indices; None where groups with equal rates leave more than one way.
    """
    if isinstance(state, Mapping) and not any(name in state for name, _ in _REPEATED):
        chained = state.get("_schedulers")
        state = chained[0] if isinstance(chained, list) and chained else state
    ways: tuple[int, ...] | None = tuple(range(len(groups)))
    for listed, grouped in _REPEATED:
        values = state.get(listed) if isinstance(state, Mapping) else None
        rates = [group.get(grouped) for group in groups]
        if not isinstance(values, list) or None in rates:
            continue
        ours, theirs = [float(rate) for rate in rates if rate is not None], [float(value) for value in values]
        if ours == theirs or sorted(ours) != sorted(theirs):
            continue
        if len(set(ours)) == len(ours):
            return tuple(theirs.index(rate) for rate in ours)
        ways = None
    return ways
