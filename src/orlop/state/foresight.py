"""Which state an optimizer's class would make for its parameters, and which hyperparameter decides that.

Owns asking the probe, once and only where somebody wants to know. Must not know checkpoints, files or ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from orlop.optim.probe import LeafSpec, foresee_state
from orlop.optim.stepping import Group

__all__ = ["Foresight"]

Specs = Mapping[str, LeafSpec]


@dataclass(slots=True, kw_only=True)
class Foresight:
    """What a first step would make under the live hyperparameters, the saved ones, and those that hold after a load.

    Attributes:
        optimizer: Whose class is asked.
        taken: For each live group, the values that the load writes into it.
        saved: For each live group, the values that were saved; empty where that is not known.
    """

    optimizer: Optimizer
    taken: Sequence[Mapping[str, Any]] = ()
    saved: Sequence[Mapping[str, Any]] = ()
    _known: dict[str, Mapping[Tensor, Specs]] = field(default_factory=dict)
    _reasons: dict[tuple[int, str], str] = field(default_factory=dict)
    _group_of: dict[Tensor, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        groups = enumerate(self.optimizer.param_groups)
        self._group_of = {param: index for index, group in groups for param in group["params"]}

    def now(self, param: Tensor) -> Specs:
        """With the live hyperparameters."""
        return self._ask("now", (), param)

    def then(self, param: Tensor) -> Specs:
        """With those that hold after the load."""
        return self._ask("then", self.taken, param)

    def before(self, param: Tensor) -> Specs:
        """With those that were saved, whether the load takes them or not."""
        return self._ask("before", self.saved, param)

    def explain(self, param: Tensor, key: str) -> str:
        """Which saved hyperparameter makes the class keep `key`, or keep it no more; empty where none does."""
        index = self._group_of[param]
        if (index, key) not in self._reasons:
            self._reasons[index, key] = self._explain(index, param, key)
        return self._reasons[index, key]

    def live_group(self, param: Tensor) -> Group:
        """The group that the parameter is in."""
        return self.optimizer.param_groups[self._group_of[param]]

    def _explain(self, index: int, param: Tensor, key: str) -> str:
        live = self.optimizer.param_groups[index]
        saved = self.saved[index] if index < len(self.saved) else {}
        for name, value in saved.items():
            if name in live and name != "params" and _text(live[name]) != _text(value):
                changed = foresee_state(self.optimizer, [param], [{**live, name: value}])
                if (key in changed[param]) != (key in self.now(param)):
                    return f"{name} is {_text(live[name])} here and {_text(value)} in the checkpoint"
        return ""

    def _ask(self, when: str, values: Sequence[Mapping[str, Any]], param: Tensor) -> Specs:
        if when not in self._known:
            groups = [dict(group) for group in self.optimizer.param_groups]
            for group, more in zip(groups, values):
                group.update({key: value for key, value in more.items() if key != "params"})
            params = [each for group in groups for each in group["params"]]
            self._known[when] = foresee_state(self.optimizer, params, groups)
        return self._known[when].get(param, {})


def _text(value: Any) -> str:
    return str(value.item() if isinstance(value, Tensor) and value.numel() == 1 else value)
