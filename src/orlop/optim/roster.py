"""Who has a place in the arena: the residents of one optimizer, while its groups and parameters change.

Owns: the proof by which they are stepped, their order, and when newcomers are admitted: new groups, parameters that
were unfrozen, cast or materialised. Must not know: how a step is run (`stepper`), what a state dict holds (`adopt`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from orlop.optim.admission import plan_residents, replaced_parameter, steps_on_local, wants_pinned
from orlop.optim.probe import constructed_state
from orlop.optim.proof import Proof
from orlop.optim.resident import Resident, Residents

__all__ = ["Roster"]


class Roster:
    """The residents of one optimizer.

    Args:
        optimizer: Whose groups and state.
        prove: Proves the class for the groups as they are.
        on_other_proof: Called before the class is proven again: what was started under the old proof is void.
        on_admitted: Called with the parameters that got a place.

    Attributes:
        residents: All of them.
        proof: How the class may be run.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        prove: Callable[[], Proof],
        *,
        on_other_proof: Callable[[], None],
        on_admitted: Callable[[Sequence[Tensor]], None],
    ) -> None:
        self.proof = prove()
        self.residents = Residents(
            lambda: optimizer.state,
            lambda params: constructed_state(optimizer, params),
            pinned=wants_pinned(optimizer.param_groups),
        )
        self._optimizer = optimizer
        self._prove = prove
        self._on_other_proof = on_other_proof
        self._on_admitted = on_admitted
        self._order: list[tuple[Tensor, Resident | None]] = []
        self._order_ids: list[int] = []
        self._meta: list[tuple[Tensor, str]] = []

    # -- who is there ------------------------------------------------------------------------------------------------

    def in_order(self) -> list[tuple[Tensor, Resident | None]]:
        """The groups' parameters with their residents; made anew when a group's list has changed."""
        groups = self._optimizer.param_groups
        ids = [id(param) for group in groups for param in group["params"]]
        if ids != self._order_ids:
            params = [param for group in groups for param in group["params"]]
            self._order = [(param, self.residents.get(param)) for param in params]
            self._order_ids = ids
        return self._order

    def active(self) -> list[Resident]:
        """Residents with a gradient; parameters that were unfrozen or given another form get their place now.

        Raises:
            ParameterReplaced: A parameter is still on the meta device.
            OptimizerRefused: A gradient is sparse.
        """
        active, late = self._with_gradients()
        if late:
            self.admit_late(late)
            active, _ = self._with_gradients()
        for param, name in self._meta:
            if param.is_meta:
                raise replaced_parameter(name)
        self._meta = []
        return active

    def _with_gradients(self) -> tuple[list[Resident], list[Tensor]]:
        """Residents with a gradient, and parameters with one that have no place of their present form."""
        # Once per parameter and step, and felt where steps are short: thousands of small parameters, fused.
        active: list[Resident] = []
        late: list[Tensor] = []
        for param, resident in self.in_order():
            grad = param.grad
            if grad is None:
                continue
            if resident is None or (not resident.stepped and resident.is_outgrown):
                late.append(param)
                continue
            if grad.layout is not torch.strided:
                resident.gradient()
            active.append(resident)
        return active, late

    def trainable(self) -> list[Resident]:
        """All residents, those of parameters that were unfrozen since among them."""
        self.admit_late(
            [
                param
                for param, resident in self.in_order()
                if param.requires_grad and (resident is None or resident.is_outgrown)
            ]
        )
        return [resident for _, resident in self.in_order() if resident is not None]

    # -- who comes ---------------------------------------------------------------------------------------------------

    def admit(self, group_indices: Iterable[int], *, also: Collection[Tensor] = ()) -> None:
        """Residents for the trainable parameters of these groups (and for those in `also`), in one new block."""
        newcomers = plan_residents(self._optimizer, self.proof, self.residents, list(group_indices), also)
        self.residents.admit(newcomers)
        self._order_ids = []
        self._on_admitted([resident.param for resident in newcomers])
        self._meta += [(resident.param, resident.name) for resident in newcomers if resident.param.is_meta]

    def admit_late(self, params: Collection[Tensor]) -> None:
        """Places for parameters that had none, and new ones for those that were given another form since."""
        if params:
            self.prove_again()
            self.make_room(params)

    def make_room(self, params: Collection[Tensor]) -> None:
        """A place for each of these that has none of its present form."""
        outgrown = [r for r in map(self.residents.get, params) if r is not None and r.is_outgrown]
        for resident in outgrown:
            self.residents.retire(resident)
        newcomers = [param for param in params if param not in self.residents]
        if newcomers:
            self.admit(range(len(self._optimizer.param_groups)), also=newcomers)
        for param in newcomers:
            if not param.requires_grad:
                self.residents.hide(self.residents[param])

    def prove_again(self) -> None:
        """There are other parameters than before: what was proven may not hold for them."""
        self._on_other_proof()
        self.proof = self._prove()
        for resident in self.residents:
            resident.on_local = steps_on_local(resident.param, self.proof)
