"""`TrainEngine`: one model, its optimizers and what belongs to them, trained, saved and resumed as one.

Owns the training step and the readiness of the live state. Must not know data, schedules of saves or directories of
checkpoints.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from numbers import Real
from types import NoneType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter
from torch.optim import Optimizer

from orlop import compat
from orlop.arguments import require_callable, require_kind, require_positive
from orlop.batches import micro_batches_of, require_loss
from orlop.errors import OptimizerRefused
from orlop.norm import clip, count_holders, total_norm
from orlop.ranks import Ranks
from orlop.resume import LoadPolicy, LoadReport, resume_checkpoint
from orlop.save import save_checkpoint
from orlop.state.agreement import Layout, require_apart
from orlop.state.names import ParameterNames, require_all_named
from orlop.state.stock import half_loaded, let_step, move_stock_state, state_of

__all__ = ["TrainEngine"]

_RESERVED = frozenset({"model", "scheduler"})


class TrainEngine:
    """A model and its optimizers, trained, saved and resumed as one. Construction is collective.

    Args:
        model: The model: plain, DistributedDataParallel, `fully_shard`ed, compiled.
        optimizer: Its optimizer, or several by name.
        scheduler: An LR scheduler; the caller steps it.
        parts: More state to save, by name: objects with `state_dict` and `load_state_dict` that hold plain data. One
            that has `check_state_dict` too, which says why a state doesn't fit (or an empty string) and changes
            nothing, is asked before a load changes anything; so it is with modules and a GradScaler.
        max_grad_norm: What `clip_grad_norm` clips to; None measures only.
        skip_grad_norm_threshold: A step with a larger norm is skipped; None skips only norms that are not finite.
        process_group: The control group, of all ranks and on CPU; by default a gloo group made here.

    Attributes:
        optimizers: The optimizers by name; a single one is `optimizer`.
        parts: Live: what is added before a save or load takes part in it.
        ranks: What this engine's ranks tell each other.

    Raises:
        ParameterReplaced: The optimizer holds parameters that are not in the model.
        TypeError: An argument is not what is meant.
        ValueError: A name is taken, a norm is not finite and above 0, or the scheduler drives another optimizer.
        RankFailed: Either of these, on any of several ranks; raised on all of them.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Mapping[str, Optimizer],
        scheduler: Any = None,
        parts: Mapping[str, Any] | None = None,
        *,
        max_grad_norm: float | None = None,
        skip_grad_norm_threshold: float | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.ranks = Ranks.create(process_group)
        with self.ranks.asked("build the engine"):
            _require_kinds(model, optimizer, scheduler)
            require_kind("parts", parts, (Mapping, NoneType), "a mapping: parts by name")
            require_positive("max_grad_norm", max_grad_norm)
            require_positive("skip_grad_norm_threshold", skip_grad_norm_threshold)
            self.model = model
            self.optimizers: Mapping[str, Optimizer] = (
                {"optimizer": optimizer} if isinstance(optimizer, Optimizer) else dict(optimizer)
            )
            self.scheduler = scheduler
            self.parts: MutableMapping[str, Any] = dict(parts or {})
            _require_names(self.optimizers, self.parts)
            _require_savable({"scheduler": scheduler, **self.parts})
            require_all_named(ParameterNames.of(model), self.optimizers)
            _require_gradients_to_measure(self.optimizers)
        self.max_grad_norm = max_grad_norm
        self.skip_grad_norm_threshold = skip_grad_norm_threshold
        self._not_ready: str | None = None
        self._begins_anew = False
        self._holders: dict[str, int] | None = None

    # -- training ----------------------------------------------------------------------------------------------------

    def train_step(self, batches: Iterable[Any], loss_fn: Callable[[nn.Module, Any], Tensor]) -> float:
        """Forward and backward over the micro-batches of one step; gradients add up to those of their mean loss.

        They are added to what `.grad` holds; after a load that is dropped first: it is of other weights.

        Args:
            batches: The micro-batches, at least one: `[batch]` for a step over one.
            loss_fn: `loss_fn(model, batch)` gives a 0-dim loss.

        Returns:
            This rank's mean loss.

        Raises:
            TypeError: A batch stands where a list of them is meant, or the loss is not one number.
        """
        micro_batches = micro_batches_of(batches)
        require_callable("loss_fn", loss_fn, "a function: loss_fn(model, batch) gives the loss")
        if self._begins_anew:
            self.model.zero_grad(set_to_none=True)
            self._begins_anew = False
        total: Tensor | None = None
        for batch in micro_batches:
            loss = loss_fn(self.model, batch)
            require_loss(loss)
            loss = loss / len(micro_batches)
            loss.backward()
            part = loss.detach().to(torch.float32)
            total = part if total is None else total + part
        assert total is not None
        return total.item()

    def clip_grad_norm(self) -> Tensor:
        """Measure the total gradient norm over all ranks and clip to `max_grad_norm`; collective.

        Plain float32 parameters that every rank has whole, on one device, are measured and clipped with the bits of
        `torch.nn.utils.clip_grad_norm_`. Sharded, split or low-precision gradients are added up in float64: the last
        bit may differ from torch's, and is the same on every rank.

        Returns:
            The norm before clipping: 0-dim, float32, on the host, with the same bits on every rank.
        """
        names = ParameterNames.of(self.model)
        params = {
            names.first(p): p for p in names.fqns if isinstance(p, nn.Parameter) and compat.is_in_mesh(p)
        }
        if self._holders is None or self._holders.keys() != params.keys():
            self._holders = count_holders(params, self.ranks)
        gradients = {name: param.grad for name, param in params.items() if param.grad is not None}
        norm = total_norm(gradients, self._holders, self.ranks)
        if self.max_grad_norm is not None:
            clip(gradients.values(), norm, self.max_grad_norm)
        return norm

    def step_optimizer(self, grad_norm: Tensor | float) -> bool:
        """Step every optimizer and drop the gradients; the scheduler is the caller's to step.

        Args:
            grad_norm: From `clip_grad_norm`: equal on all ranks, so that all decide alike.

        Returns:
            False when the norm is not finite or over the threshold: then no state has changed.

        Raises:
            StateNotReady: A load failed half-way and none has succeeded since.
        """
        self.require_ready()
        require_kind("grad_norm", grad_norm, (Tensor, Real), "the norm that clip_grad_norm returned")
        norm = float(grad_norm)
        threshold = self.skip_grad_norm_threshold
        taken = math.isfinite(norm) and (threshold is None or norm <= threshold)
        if taken:
            for optimizer in self.optimizers.values():
                optimizer.step()
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none=True)
        self.model.zero_grad(set_to_none=True)
        return taken

    # -- saving and loading ------------------------------------------------------------------------------------------

    def save_dcp(
        self,
        weights_dir: str | os.PathLike[str],
        save_optimizer: bool = True,
        *,
        include_frozen: bool = True,
        optimizer_layout: Layout = "nested",
        materialize_absent: bool = False,
        storage_writer: StorageWriter | None = None,
        key_prefix: str = "",
    ) -> None:
        """Save all parts as one DCP checkpoint; collective. See `orlop.save.save_checkpoint`.

        Args:
            weights_dir: The checkpoint's directory; it must not hold anything, and appears whole or not at all.
            save_optimizer: Whether optimizer state and groups are saved.
            include_frozen: Whether parameters that don't train are saved.
            optimizer_layout: `nested` in groups, or `flattened` by parameter, as torchtitan writes it.
            materialize_absent: Whether parameters that never stepped get initial state in the file, for other readers.
            storage_writer: Writes the checkpoint instead.
            key_prefix: Put before every key.
        """
        save_checkpoint(
            self,
            weights_dir,
            save_optimizer=save_optimizer,
            include_frozen=include_frozen,
            optimizer_layout=optimizer_layout,
            materialize_absent=materialize_absent,
            storage_writer=storage_writer,
            key_prefix=key_prefix,
        )

    def load_dcp(
        self,
        weights_dir: str | os.PathLike[str],
        load_states: bool = True,
        load_args: bool = True,
        *,
        policy: LoadPolicy | None = None,
        storage_reader: StorageReader | None = None,
        key_prefix: str = "",
    ) -> LoadReport:
        """Load a DCP checkpoint in place; collective. See `orlop.resume.resume_checkpoint`.

        Args:
            weights_dir: The checkpoint's directory.
            load_states: False gives every parameter a fresh optimizer's state.
            load_args: False keeps the live hyperparameters of every group.
            policy: What may differ; by default nothing.
            storage_reader: Reads the checkpoint instead.
            key_prefix: What was put before every key.
        """
        return resume_checkpoint(
            self,
            weights_dir,
            load_states=load_states,
            load_args=load_args,
            policy=policy,
            storage_reader=storage_reader,
            key_prefix=key_prefix,
        )

    def invalidate(self, reason: str) -> None:
        """The live state is half old, half new from here on: this and the optimizers refuse to step and to save."""
        self._not_ready = reason
        for optimizer in self.optimizers.values():
            state_of(optimizer).invalidate(reason)

    def mark_ready(self) -> None:
        """A load has succeeded: the live state is whole again."""
        self._not_ready = None
        for optimizer in self.optimizers.values():
            let_step(optimizer)
        self._begins_anew = True

    def require_ready(self) -> None:
        """Raise StateNotReady after a load that failed half-way."""
        if self._not_ready is not None:
            raise half_loaded(self._not_ready)

    # -- moving ------------------------------------------------------------------------------------------------------

    def put_model_to_device(self, device: torch.device | str) -> bool:
        """Move the model; its parameters stay the same objects.

        Returns:
            False when it was there already.
        """
        target = torch.device(device)
        tensors = ParameterNames.of(self.model).fqns
        if all(_is_on(tensor, target) for tensor in tensors):
            return False
        self.model.to(target)
        return True

    def put_optimizer_to_device(self, device: torch.device | str) -> bool:
        """Move stock optimizers' state; host counters such as `step` stay where the class wants them.

        Returns:
            False when nothing moved: the state is host-resident, or was there already.
        """
        moved = [
            getattr(optimizer, "put_state_to_device", None) is None
            and move_stock_state(optimizer, torch.device(device))
            for optimizer in self.optimizers.values()
        ]
        return any(moved)


def _require_kinds(model: Any, optimizer: Any, scheduler: Any) -> None:
    """Say at once what is no model or optimizer, and a scheduler that drives another optimizer."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"the first argument is the model, a torch.nn.Module, not {type(model).__name__}")
    given = list(optimizer.values()) if isinstance(optimizer, Mapping) else [optimizer]
    for each in given:
        if not isinstance(each, Optimizer):
            what = each.__name__ + " itself" if isinstance(each, type) else type(each).__name__
            raise TypeError(f"the second argument is an optimizer, or optimizers by name, not {what}")
    driven = getattr(scheduler, "optimizer", None)
    if driven is not None and not any(driven is each for each in given):
        raise ValueError("the scheduler drives another optimizer than the engine's: build it on that one")


def _require_names(optimizers: Mapping[str, Optimizer], parts: Mapping[str, Any]) -> None:
    for name in (*optimizers, *parts):
        require_kind("the name of an optimizer or part", name, str, "a string")
        if name in _RESERVED or (name in optimizers and name in parts):
            raise ValueError(f"a part or optimizer can't be named {name!r}: that name is taken")
    require_apart([*optimizers, *parts])


def _require_savable(parts: Mapping[str, Any]) -> None:
    for name, part in parts.items():
        if part is not None and not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            kind = type(part).__name__
            raise TypeError(f"{name!r} can't be saved: {kind} has no state_dict and load_state_dict")


def _require_gradients_to_measure(optimizers: Mapping[str, Optimizer]) -> None:
    """Refuse optimizers that step during backward: the engine clips and skips by a norm known only afterwards."""
    for name, optimizer in optimizers.items():
        passes = getattr(optimizer, "step_in_backward", 0)
        if passes:
            raise OptimizerRefused(
                "the engine clips gradients, and skips steps, by the norm over all of them; an optimizer that steps "
                "during backward has freed them by then",
                where=f"optimizer {name!r}",
                expected="step_in_backward=False",
                found=f"step_in_backward={passes}",
                todo="build it without step_in_backward, or train without the engine's step",
            )


def _is_on(tensor: Tensor, device: torch.device) -> bool:
    local = compat.local_tensor(tensor)
    return local.device.type == device.type and device.index in (None, local.device.index)
