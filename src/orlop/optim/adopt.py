"""Loads an optimizer state dict into the arena, in place: everything is decided before the first byte is
copied.

Owns: torch's protocol for ids and groups, what counts as the same state, and what may be widened. Must not
know: files. The caller's dict is neither changed nor aliased."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from orlop import compat
from orlop.errors import CheckpointMismatch
from orlop.optim.resident import Resident, Residents
from orlop.optim.stepping import IMPLEMENTATION_FLAGS, Group
from orlop.wording import counted

logger = logging.getLogger("orlop")

_KEPT = ("params", *IMPLEMENTATION_FLAGS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adoption:
    """What a state dict will do to the live optimizer.

    Attributes:
        present: Each resident with the values that it takes over.
        absent: Residents whose state the dict does not hold: they get a fresh optimizer's.
        groups: Each live group with the values that it takes over.
        unexplained: Names of trainable parameters that are absent while others are present.
    """

    present: Sequence[tuple[Resident, Mapping[str, Any]]]
    absent: Sequence[Resident]
    groups: Sequence[tuple[Group, Mapping[str, Any]]]
    unexplained: Sequence[str]


def plan_adoption(residents: Residents, groups: Sequence[Group], state_dict: Mapping[str, Any]) -> Adoption:
    """Decide what to copy where; nothing live changes.

    Args:
        residents: The live state.
        groups: The live param groups.
        state_dict: As `torch.optim.Optimizer.state_dict` makes it; ids may be numbers or FQNs.

    Raises:
        CheckpointMismatch: Groups, ids, keys, shapes or dtypes differ; names parameter, key, expected and
            found.
    """
    saved_groups = list(state_dict["param_groups"])
    pairs = _paired_groups(groups, saved_groups)
    param_of = _param_of(pairs)
    saved_state = {key: _present(entry) for key, entry in state_dict["state"].items()}
    unknown = [key for key in saved_state if key not in param_of]
    if unknown:
        raise CheckpointMismatch(
            "the state dict holds state of parameters that are in none of its groups",
            where=f"ids {_some(unknown)}",
            expected=f"ids of its own groups, such as {_some(list(param_of))}",
            found=f"{len(unknown)} of {len(saved_state)} ids unknown",
            todo="load the state dict with the groups that it was saved with",
        )
    entry_of = {param_of[key]: entry for key, entry in saved_state.items() if entry}
    present = [(residents[param], _checked(residents[param], entry)) for param, entry in entry_of.items()]
    absent = [resident for resident in residents if resident.param not in entry_of]
    missing = [r.name for r in absent if r.specs and r.param.requires_grad] if present else []
    return Adoption(
        present=present,
        absent=absent,
        groups=[(live, _taken_over(live, saved)) for live, saved in pairs],
        unexplained=missing,
    )


def require_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Refuse what is no optimizer state dict.

    Raises:
        CheckpointMismatch: Says which keys are missing.
    """
    missing = [key for key in ("state", "param_groups") if key not in state_dict]
    if missing:
        raise CheckpointMismatch(
            "this is no optimizer state dict",
            expected="the keys 'state' and 'param_groups'",
            found=f"keys {_some([*state_dict]) or 'none'}; missing {missing}",
            todo="give what optimizer.state_dict() returned",
        )


def paired_params(groups: Sequence[Group], saved: Sequence[Group]) -> dict[Any, Tensor]:
    """The live parameter of each saved id: by `param_names` where all groups have them, else by position.

    Raises:
        CheckpointMismatch: The groups do not match.
    """
    return _param_of(_paired_groups(groups, list(saved)))


def apply_adoption(residents: Residents, adoption: Adoption) -> None:
    """Copy what was planned."""
    with torch.no_grad():
        for resident, values in adoption.present:
            numbers = {}
            for key, value in values.items():
                if key in resident.leaves:
                    _fill(resident.leaves[key], value)
                else:
                    numbers[key] = value
            residents.show(resident, numbers, order=list(values))
            resident.stepped = not residents.is_fresh(resident)
        for resident in adoption.absent:
            residents.refresh(resident)
        for live, values in adoption.groups:
            fill_group(live, values)
    if adoption.unexplained:
        logger.warning(
            "%s no state in the loaded state dict, so a fresh optimizer's: %s",
            counted(len(adoption.unexplained), "parameter has", "parameters have"),
            _some(adoption.unexplained),
        )


def fill_group(live: Group, values: Mapping[str, Any]) -> None:
    """Write hyperparameters into a live group: a tensor stays the same tensor object, a number stays a
    number."""
    for key, value in values.items():
        current = live.get(key)
        if isinstance(current, Tensor):
            with torch.no_grad():
                current.copy_(torch.as_tensor(value))
        elif isinstance(value, Tensor) and isinstance(current, (int, float)):
            live[key] = type(current)(value.item())
        else:
            live[key] = copy.deepcopy(value)


# -- pairing ---------------------------------------------------------------------------------------------------------


def _sizes(groups: Sequence[Group]) -> str:
    return counted(len(groups), "group") + f" of {[len(group['params']) for group in groups]} parameters"


def _paired_groups(groups: Sequence[Group], saved: Sequence[Group]) -> list[tuple[Group, Group]]:
    """Live and saved groups that belong together: by `param_names` where all have them, else by position."""
    if len(groups) != len(saved):
        raise CheckpointMismatch(
            "the state dict has another number of param groups",
            expected=_sizes(groups),
            found=_sizes(saved),
            todo="build the optimizer with the groups that were saved",
        )
    if _all_named(groups) and _all_named(saved):
        by_names = {frozenset(group["param_names"]): group for group in saved}
        for index, live in enumerate(groups):
            if frozenset(live["param_names"]) not in by_names:
                raise CheckpointMismatch(
                    "no saved param group holds the same parameter names as a live one",
                    where=f"param group {index}",
                    expected=_some(live["param_names"]),
                    found="; ".join(_some(group["param_names"]) for group in saved),
                    todo="build the optimizer with the groups that were saved",
                )
        return [(live, by_names[frozenset(live["param_names"])]) for live in groups]
    for index, (live, other) in enumerate(zip(groups, saved)):
        if len(live["params"]) != len(other["params"]):
            raise CheckpointMismatch(
                "a param group of the state dict has another size",
                where=f"param group {index}",
                expected=counted(len(live["params"]), "parameter"),
                found=counted(len(other["params"]), "parameter"),
                todo="build the optimizer with the groups that were saved",
            )
    return list(zip(groups, saved))


def _param_of(pairs: Sequence[tuple[Group, Group]]) -> dict[Any, Tensor]:
    return {saved_id: param for live, other in pairs for param, saved_id in _paired_params(live, other)}


def _paired_params(live: Group, saved: Group) -> list[tuple[Tensor, Any]]:
    if _all_named([live, saved]):
        id_of = dict(zip(saved["param_names"], saved["params"]))
        return [(param, id_of[name]) for name, param in zip(live["param_names"], live["params"])]
    return list(zip(live["params"], saved["params"]))


def _all_named(groups: Sequence[Group]) -> bool:
    return all(len(group.get("param_names", ())) == len(group["params"]) for group in groups)


def _present(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Without placeholders: amsgrad=False is stored by some as `max_exp_avg_sq` = None."""
    return {key: value for key, value in entry.items() if value is not None}


def _taken_over(live: Group, saved: Group) -> dict[str, Any]:
    return {
        key: value
        for key, value in saved.items()
        if key not in _KEPT and not (key == "param_names" and "param_names" in live)
    }


# -- checking one parameter ------------------------------------------------------------------------------------------


def _checked(resident: Resident, entry: Mapping[str, Any]) -> dict[str, Any]:
    """The values to copy, each checked against what the live state is."""
    missing, extra = sorted(set(resident.specs) - set(entry)), sorted(set(entry) - set(resident.specs))
    if missing or extra:
        raise CheckpointMismatch(
            "the state of a parameter has other keys than its optimizer class keeps",
            where=f"parameter {resident.name}",
            expected=_some(sorted(resident.specs)) or "no state",
            found=f"missing {missing}, extra {extra}",
            todo="build the optimizer with the class and options that were saved (amsgrad, momentum, ...)",
        )
    return {key: _checked_value(resident, key, value) for key, value in entry.items()}


def _checked_value(resident: Resident, key: str, value: Any) -> Any:
    spec = resident.specs[key]
    where = f"parameter {resident.name}, key {key!r}"
    if spec.number:
        number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        if isinstance(number, Tensor):
            raise _mismatch(
                "a tensor where the class keeps a number", where, "a number", str(tuple(number.shape))
            )
        return number
    leaf = resident.leaves[key]
    if not isinstance(value, Tensor):
        if leaf.ndim or not isinstance(value, (int, float)) or not holds_exactly(leaf.dtype, value):
            raise _mismatch("a value where the class keeps a tensor", where, _kind(leaf), repr(value))
        return torch.tensor(value, dtype=leaf.dtype)
    local = compat.local_tensor(value)
    if local.is_meta:
        raise _mismatch("a tensor without values", where, _kind(leaf), "a meta tensor")
    canonical = resident.canonical[key]
    if local.shape != leaf.shape or (value.shape != canonical.shape and isinstance(value, compat.DTensor)):
        raise _mismatch("the state of a parameter has another shape", where, _kind(leaf), _kind(local))
    if isinstance(value, compat.DTensor) and compat.placements(value) != compat.placements(canonical):
        raise _mismatch(
            "the state of a parameter is placed otherwise",
            where,
            str(compat.placements(canonical)),
            str(compat.placements(value)),
        )
    exact = leaf.ndim == 0 and not local.is_meta and holds_exactly(leaf.dtype, local.item())
    if not widens(local.dtype, leaf.dtype) and not exact:
        raise _mismatch("copying would lose precision", where, _kind(leaf), _kind(local))
    return local


def widens(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether every value of `source` is a value of `target`, of the same kind (float, integer, complex)."""
    if source == target:
        return True
    if (source.is_floating_point and target.is_floating_point) or (source.is_complex and target.is_complex):
        small, large = torch.finfo(source), torch.finfo(target)
        return (
            small.eps >= large.eps
            and small.max <= large.max
            and small.smallest_normal >= large.smallest_normal
        )
    kinds = (source.is_floating_point, source.is_complex, target.is_floating_point, target.is_complex)
    if any(kinds) or torch.bool in (source, target):
        return False
    low, high = torch.iinfo(source), torch.iinfo(target)
    return high.min <= low.min and low.max <= high.max


def holds_exactly(dtype: torch.dtype, value: Any) -> bool:
    """Whether a scalar is a value of `dtype`: 257 is no bfloat16, 7 is any kind of number."""
    if isinstance(value, complex) and not dtype.is_complex:
        return False
    if isinstance(value, float) and not (dtype.is_floating_point or dtype.is_complex):
        return False
    try:
        stored = torch.tensor(value, dtype=dtype).item()
    except (RuntimeError, OverflowError, TypeError):
        return False
    return bool(stored == value) or (stored != stored and value != value)


def _fill(leaf: Tensor, value: Tensor) -> None:
    # torch's own setters may hand over the live tensors themselves.
    if value.data_ptr() != leaf.data_ptr() or value.device != leaf.device:
        leaf.copy_(value)


def _mismatch(what: str, where: str, expected: str, found: str) -> CheckpointMismatch:
    return CheckpointMismatch(
        what,
        where=where,
        expected=expected,
        found=found,
        todo="load into the model and optimizer that were saved",
    )


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def _some(items: Sequence[Any], most: int = 5) -> str:
    shown = ", ".join(str(item) for item in items[:most])
    return shown + (f", ... ({len(items)} in all)" if len(items) > most else "")


def replay_pre_hooks(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """Run the hooks that torch runs before a load, on a shallow copy, as torch does."""
    working: Mapping[str, Any] = dict(state_dict)
    for hook in compat.load_pre_hooks(optimizer):
        result = hook(optimizer, working)
        if result is not None:
            working = result
    return working


def replay_post_hooks(optimizer: Optimizer) -> None:
    """Run the hooks that torch runs after a load."""
    for hook in compat.load_post_hooks(optimizer):
        hook(optimizer)
