"""What the names of a checkpoint's leaves tell: state that is lost or there in part, names that don't meet.

Owns these rules. Pure: names and the manifest in, findings out. They hold without the model; `against` knows more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping

from orlop.store.manifest import Manifest, StateKeys
from orlop.tools.findings import Finding
from orlop.tools.leaf_names import split_state

__all__ = ["check_groups", "check_names"]

_SHOWN = 3
_PARTIAL = "a parameter has only some of its optimizer state"
_TODO = "resume from another step, or let the resume reset it (LoadPolicy(reset_damaged=...))"


def check_names(
    leaves: Collection[str],
    optimizers: set[str],
    groups: Mapping[tuple[str, str], int],
    manifest: Manifest | None = None,
) -> Iterator[Finding]:
    """The findings of all rules.

    Args:
        leaves: The checkpoint's keys.
        optimizers: The optimizers' names.
        groups: For (optimizer, parameter) the number of its param group, where that is known.
        manifest: What orlop noted at the save, where it did.
    """
    state: defaultdict[str, defaultdict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for leaf in leaves:
        split = split_state(leaf, optimizers)
        if split is not None:
            label, fqn, key = split
            state[label][fqn].add(key)
    recorded = _by_label(manifest, {*optimizers, *state})
    for label, params in state.items():
        if label not in recorded:
            yield from _partial(label, params, groups)
        yield from _apart(label, params, leaves)
    for label, (record, absent) in recorded.items():
        stored = dict(state.get(label, ()))
        grouped = {fqn for optimizer, fqn in groups if optimizer == label}
        for fqn in sorted({*grouped, *record.others, *stored} - absent):
            yield from _unlike_record(f"{label}.state.{fqn}", set(record[fqn]), stored.get(fqn, set()))


def check_groups(
    options: Iterable[tuple[str, int, Collection[str]]], manifest: Manifest
) -> Iterator[Finding]:
    """Hyperparameters that the manifest knows and a param group lacks.

    Args:
        options: For each group its optimizer's name, its index, and its hyperparameters' names.
        manifest: What orlop noted at the save.
    """
    groups = list(options)
    labels = {label for label, _, _ in groups}
    recorded = {_label_of(name, labels): keys for name, keys in manifest.group_keys.items()}
    for label, index, names in groups:
        for key in recorded.get(label, ()):
            if not any(name == key or name.startswith(f"{key}.") for name in names):
                yield Finding(
                    kind="lost",
                    where=f"{label}.param_groups.{index}.{key}",
                    what="a hyperparameter is lost",
                    todo="resume from another step",
                )


def _by_label(manifest: Manifest | None, labels: set[str]) -> dict[str, tuple[StateKeys, set[str]]]:
    """What was recorded of each optimizer: keys of state, and who has none."""
    found: dict[str, tuple[StateKeys, set[str]]] = {}
    if manifest is not None:
        for name, record in sorted(manifest.state_keys.items()):
            found[_label_of(name, labels)] = record, set(manifest.absent.get(name, ()))
    return found


def _label_of(name: str, labels: set[str]) -> str:
    """What an optimizer of the manifest is called in the keys, which may have a prefix that names there lack."""
    return min((label for label in labels if label.endswith(name)), key=len, default=name)


def _unlike_record(where: str, recorded: set[str], present: set[str]) -> Iterator[Finding]:
    if recorded - present:
        yield Finding(
            kind="partial" if present else "lost",
            where=where,
            what=_PARTIAL if present else "a parameter's optimizer state is lost",
            expected=", ".join(sorted(recorded)) + ", as when it was saved",
            found=", ".join(sorted(present)) or "nothing of it",
            todo=_TODO,
        )


def _partial(
    label: str, params: Mapping[str, set[str]], groups: Mapping[tuple[str, str], int]
) -> Iterator[Finding]:
    """Within one param group, options are the same: a parameter there has the state that the others have."""
    kinds: defaultdict[int | None, set[frozenset[str]]] = defaultdict(set)
    for fqn, keys in params.items():
        kinds[groups.get((label, fqn))].add(frozenset(keys))
    for fqn, keys in params.items():
        larger = [kind for kind in kinds[groups.get((label, fqn))] if kind > keys]
        if larger:
            whole = min(larger, key=len)
            yield Finding(
                kind="partial",
                where=f"{label}.state.{fqn}",
                what=_PARTIAL,
                expected=", ".join(sorted(whole)),
                found=", ".join(sorted(keys)),
                todo=_TODO,
            )


def _apart(label: str, params: Mapping[str, set[str]], leaves: Collection[str]) -> Iterator[Finding]:
    """Optimizer state belongs to parameters that the model has under the same names."""
    prefix = f"{label.rpartition('.')[0]}.model." if "." in label else "model."
    model = {leaf.removeprefix(prefix) for leaf in leaves if leaf.startswith(prefix)}
    if model and not model & set(params):
        yield Finding(
            kind="names",
            where=f"{label}.state",
            what="not one parameter of the optimizer's state is in the model",
            expected=", ".join(sorted(model)[:_SHOWN]),
            found=", ".join(sorted(params)[:_SHOWN]),
            todo="the two were saved under different names (a wrapper's prefix); load them with a matching model",
        )
