"""What an optimizer keeps of its parameters, and the memory in which it is kept.

Owns: one `Resident` per parameter, the arena behind them, and the rule that `optimizer.state` shows exactly
what the arena holds (one owner, no second map). Must not know: how a step is run, how a checkpoint is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from orlop import compat
from orlop.errors import OptimizerRefused
from orlop.optim.arena import Arena
from orlop.optim.probe import LeafSpec
from orlop.optim.proof import Initial
from orlop.optim.stepping import stand_in


@dataclass(slots=True, eq=False, kw_only=True)
class Resident:
    """One parameter and its state's place in the arena.

    Attributes:
        param: The live parameter.
        name: What to call it in messages.
        specs: What its class keeps, key by key.
        leaves: This rank's tensors, in the arena, by key; numbers have none.
        canonical: The same tensors as `optimizer.state` shows them: DTensors where they follow a DTensor
            parameter.
        initial: What each key starts from, where that is a constant; None where only the class can make the
            state.
        on_local: The class steps on this rank's part rather than on the DTensor.
        stepped: It took a step, in this run or in the one that it was loaded from.
        shown: `optimizer.state` shows its state; true from the start for a class without any.
        form: The parameter's dtype and local shape when its place was made.
        is_given: Its first state was there already: the class makes it in its constructor, or it is a copy.
        learned: The keys among `specs` that the probe did not foresee.
    """

    param: Tensor
    name: str
    specs: Mapping[str, LeafSpec]
    leaves: dict[str, Tensor] = field(default_factory=dict)
    canonical: dict[str, Tensor] = field(default_factory=dict)
    initial: Initial | None = None
    on_local: bool = False
    stepped: bool = False
    shown: bool = False
    form: tuple[torch.dtype, torch.Size] = field(init=False)
    is_given: bool = False
    learned: set[str] = field(default_factory=set)
    _twin: tuple[Tensor, Tensor] | None = None

    def __post_init__(self) -> None:
        self.form = _form(self.param)

    @property
    def is_outgrown(self) -> bool:
        """Whether the stock class would make other state at its first step than stands here: the module was
        given another dtype since (``module.to``). Stock classes never change state that is there."""
        return not (self.stepped or self.is_given) and self.form != _form(self.param)

    @property
    def number_keys(self) -> frozenset[str]:
        """State keys under which the class keeps a Python number."""
        return frozenset(key for key, spec in self.specs.items() if spec.number)

    @property
    def is_eager(self) -> bool:
        """Whether its state exists before the first step."""
        return self.initial is not None

    def hold(self, key: str, leaf: Tensor, *, elementwise: bool) -> None:
        """Make `leaf` the owner of the state under `key`."""
        self.leaves[key] = leaf
        self.canonical[key] = compat.dtensor_like(self.param, leaf) if elementwise else leaf

    def drop(self, key: str) -> None:
        """Keep no state under `key` any more."""
        self.specs = {known: spec for known, spec in self.specs.items() if known != key}
        self.leaves.pop(key, None)
        self.canonical.pop(key, None)
        self.learned.discard(key)

    def local(self) -> Tensor:
        """What the class is shown for this parameter: itself, or a stand-in over this rank's part of it."""
        if not self.on_local:
            return self.param
        part = compat.local_tensor(self.param)
        if self._twin is None or self._twin[0] is not part:
            self._twin = (part, stand_in(part, None))
        return self._twin[1]

    def gradient(self) -> Tensor | None:
        """The gradient that belongs to `local()`.

        Raises:
            OptimizerRefused: The gradient is sparse.
        """
        grad = self.param.grad
        if grad is None:
            return None
        if grad.layout != torch.strided:
            raise OptimizerRefused(
                "sparse gradients can't be stepped on with host-resident state",
                where=f"parameter {self.name}",
                expected="a dense gradient",
                found=f"layout {grad.layout}",
                todo="build the embedding with sparse=False, or give this parameter to a stock optimizer",
            )
        return compat.local_tensor(compat.gradient_like(self.param, grad)) if self.on_local else grad


class Residents:
    """All residents of one optimizer, in the order of its groups.

    Args:
        state: Gives the optimizer's own `state`, which is shown what the arena holds; the optimizer may replace it.
        construct: Gives the state that the class makes for parameters in its constructor.
        pinned: Page-lock the arena.
    """

    def __init__(
        self,
        state: Callable[[], MutableMapping[Any, Any]],
        construct: Callable[[Sequence[Tensor]], Mapping[Tensor, Mapping[str, Any]]],
        *,
        pinned: bool,
    ) -> None:
        self.arena = Arena(pinned=pinned)
        self._live_state = state
        self._construct = construct
        self._of: dict[Tensor, Resident] = {}

    @property
    def _state(self) -> MutableMapping[Any, Any]:
        return self._live_state()

    def __iter__(self) -> Any:
        return iter(self._of.values())

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, param: object) -> bool:
        return param in self._of

    def __getitem__(self, param: Tensor) -> Resident:
        return self._of[param]

    def get(self, param: Tensor) -> Resident | None:
        """The parameter's resident; None for one that has no place yet (frozen)."""
        return self._of.get(param)

    @property
    def state_bytes(self) -> int:
        """Bytes of all leaves."""
        return sum(leaf.nbytes for resident in self for leaf in resident.leaves.values())

    def admit(self, newcomers: Sequence[Resident]) -> None:
        """Give each newcomer its place in one new block; take in the state that exists, or start from the
        constants.

        Raises:
            HostMemoryError: The host can't give the block; nobody was admitted.
        """
        # Key by key, as kernels go through them: all first moments, then all second ones. Parameter by
        # parameter, a step on small parameters is some 8 % slower.
        wanted = [(r, key, spec) for r in newcomers for key, spec in r.specs.items() if not spec.number]
        wanted.sort(key=lambda each: each[1])
        leaves = self.arena.grow([spec for _, _, spec in wanted])
        for (resident, key, spec), leaf in zip(wanted, leaves):
            resident.hold(key, leaf, elementwise=spec.elementwise)
        for resident in newcomers:
            self._of[resident.param] = resident
            existing = self._state.get(resident.param, {})
            if existing and not any(isinstance(v, Tensor) and v.is_meta for v in existing.values()):
                self.take_in(resident, existing)
                resident.is_given = True
            else:
                self.refresh(resident)

    def retire(self, resident: Resident) -> None:
        """Take its place from a resident; memory that nobody is left in goes back to the host."""
        del self._of[resident.param]
        self._state.pop(resident.param, None)

    def take_in(self, resident: Resident, values: Mapping[str, Any]) -> None:
        """Copy tensors into the arena, unless they are there already, and show them under the parameter."""
        for key, value in values.items():
            if isinstance(value, Tensor):
                self.take_leaf(resident, key, value)
        numbers = {key: value for key, value in values.items() if not isinstance(value, Tensor)}
        self.show(resident, numbers, order=list(values))

    def become(self, resident: Resident, state: Mapping[str, Any]) -> None:
        """Take over a state that was loaded: its slots hold it already, and what the probe did not foresee comes and
        goes."""
        strange = [
            k for k, v in state.items() if isinstance(v, Tensor) and v is not resident.canonical.get(k)
        ]
        for key in [*(key for key in resident.specs if key not in state), *strange]:
            resident.drop(key)
        for key in strange:
            self.take_leaf(resident, key, state[key], is_loaded=True)
        self.show(resident, {key: value for key, value in state.items() if not isinstance(value, Tensor)})

    def take_leaf(self, resident: Resident, key: str, value: Tensor, *, is_loaded: bool = False) -> None:
        """Copy one tensor home. A key that the probe did not foresee gets a block of its own.

        Args:
            resident: Whose.
            key: Its key in the state.
            value: The tensor.
            is_loaded: It comes from a checkpoint, and where it lies now says nothing of where the class wants it.
        """
        local = compat.local_tensor(value)
        if key not in resident.leaves:
            part = compat.local_tensor(resident.param)
            follows = local.ndim > 0 and local.shape == part.shape
            spec = LeafSpec(
                shape=local.shape,
                stride=tuple(local.stride()),
                dtype=local.dtype,
                elementwise=follows,
                on_device=local.device == part.device or (is_loaded and follows),
            )
            resident.specs = {**resident.specs, key: spec}
            resident.learned.add(key)
            resident.hold(key, self.arena.grow([spec])[0], elementwise=spec.elementwise)
        if local is not resident.leaves[key]:
            resident.leaves[key].copy_(local)

    def show(
        self, resident: Resident, numbers: Mapping[str, Any], order: Sequence[str] | None = None
    ) -> None:
        """Put the resident's leaves, and the given numbers, under its parameter in the optimizer's state."""
        resident.shown = True
        merged = {**resident.canonical, **numbers}
        entry = self._state.get(resident.param)
        if entry and entry.keys() == merged.keys():
            entry.update(merged)
            return
        keys = order if order is not None else [*resident.specs]
        ordered = [*(key for key in keys if key in merged), *(key for key in merged if key not in keys)]
        self._state[resident.param] = {key: merged[key] for key in ordered}

    def hide(self, resident: Resident) -> None:
        """It has a place, but no state yet: a frozen parameter whose state may be loaded."""
        self._state.pop(resident.param, None)
        resident.shown = not resident.specs

    def refresh(self, resident: Resident) -> None:
        """Give the resident a fresh optimizer's state, in place; none where only the class's step can make it."""
        resident.stepped = False
        for key in tuple(resident.learned):
            resident.drop(key)
        if resident.initial is None or not resident.specs:
            self._state.pop(resident.param, None)
            resident.shown = not resident.specs
            made = self._construct([resident.param]) if resident.is_given else {}
            if made.get(resident.param):
                self.take_in(resident, made[resident.param])
            return
        for key, leaf in resident.leaves.items():
            leaf.fill_(resident.initial.get(key, 0.0))
        self.show(resident, {key: _number(resident, key) for key in resident.number_keys})

    def is_fresh(self, resident: Resident) -> bool:
        """Whether the resident's state can't be told from a fresh optimizer's."""
        shown = self._state.get(resident.param)
        if not shown:
            return True
        if resident.initial is None:
            return False
        scalars_first = sorted(resident.leaves, key=lambda key: resident.leaves[key].numel())
        return all(
            bool((resident.leaves[key] == resident.initial.get(key, 0.0)).all()) for key in scalars_first
        ) and all(shown[key] == resident.initial.get(key, 0.0) for key in resident.number_keys)


def _form(param: Tensor) -> tuple[torch.dtype, torch.Size]:
    return param.dtype, compat.local_tensor(param).shape


def _number(resident: Resident, key: str) -> float | int:
    assert resident.initial is not None
    value = resident.initial.get(key, 0.0)
    return value if resident.specs[key].dtype.is_floating_point else int(value)
