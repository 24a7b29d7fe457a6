"""`diff`: what differs between two checkpoints, whatever their world sizes, layouts and writers.

Owns which leaves are held against each other. How values differ is `differences`'; param groups are compared by the
names of their parameters. Needs torch; holds one region of a tensor at a time.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from orlop.dcp.catalog import TensorEntry
from orlop.tools import overview, param_groups
from orlop.tools.differences import Difference, ValueComparison, first_difference
from orlop.tools.findings import Finding
from orlop.tools.opened import Opened
from orlop.tools.stored_values import StoredValues, regions

__all__ = ["DiffResult", "diff", "diff_checkpoints"]

# Of the live run, not of its state: two runs of one training may well differ in them.
_FLAGS = frozenset({"foreach", "fused", "capturable", "differentiable"})
_PER_RANK = re.compile(r"(.+)\.rank_\d+")
_SHOWN = 3


@dataclass(slots=True, kw_only=True)
class DiffResult:
    """What `diff_checkpoints` found.

    Attributes:
        findings: All differences; notes on what was not compared.
        values: Of the tensors whose values differ, how.
        num_compared: Leaves that both sides have.
        num_identical: Of these, those that are the same bit for bit.
    """

    findings: list[Finding] = field(default_factory=list)
    values: list[Difference] = field(default_factory=list)
    num_compared: int = 0
    num_identical: int = 0

    @property
    def is_same(self) -> bool:
        """Whether nothing that counts differs."""
        return not any(finding.is_fault for finding in self.findings)


def diff(a: str | os.PathLike[str], b: str | os.PathLike[str], *, exact: bool = False) -> list[Finding]:
    """Compare two checkpoints leaf by leaf.

    Args:
        a: orlop's own, or any DCP directory.
        b: Likewise; on any other number of ranks.
        exact: Whether values have to be the same bit for bit, so that -0.0 is not 0.0 and NaNs have payloads; then
            implementation flags of param groups (`foreach`, `fused`, ...) count as well.

    Raises:
        CheckpointError: One of them can't be read.
    """
    return diff_checkpoints(a, b, exact=exact).findings


def diff_checkpoints(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    exact: bool = False,
    on_leaf: Callable[[int, int], None] | None = None,
) -> DiffResult:
    """As `diff`, with the differences of values in numbers.

    Args:
        a: One side.
        b: The other.
        exact: Bit for bit.
        on_leaf: Told of progress: bytes compared so far, bytes in all.
    """
    sides = (StoredValues(Opened(a)), StoredValues(Opened(b)))
    result = DiffResult()
    result.findings += _compare_groups(sides, exact)
    names = [_leaves(side) for side in sides]
    result.findings += _one_sided(names, sides)
    common = sorted(names[0] & names[1])
    rows = {row.leaf: row.nbytes for row in overview.leaves(sides[0].catalog)}
    total, done = sum(rows[leaf] for leaf in common), 0
    for leaf in common:
        found = list(_compare_leaf(leaf, sides, exact, result))
        result.findings += found
        result.num_compared += 1
        done += rows[leaf]
        if on_leaf is not None:
            on_leaf(done, total)
    return result


def _leaves(side: StoredValues) -> set[str]:
    return {leaf for leaf in side.catalog.leaves if ".param_groups." not in leaf}


def _one_sided(names: list[set[str]], sides: tuple[StoredValues, StoredValues]) -> Iterator[Finding]:
    ranks = [{match[0] for leaf in side if (match := _PER_RANK.fullmatch(leaf))} for side in names]
    for number in (0, 1):
        there, other = sides[number].opened.location, sides[1 - number].opened.location
        for leaf in sorted(names[number] - names[1 - number]):
            if leaf in ranks[number] and any(_same_part(leaf, one) for one in ranks[1 - number]):
                what = "kept per rank, and the two were saved on other numbers of ranks"
                yield Finding(kind="unchecked", where=leaf, what=what)
                continue
            yield Finding(
                kind="missing" if number == 0 else "unexpected",
                where=leaf,
                what=f"in {there}, not in {other}",
            )


def _same_part(one: str, other: str) -> bool:
    return one.rpartition(".")[0] == other.rpartition(".")[0]


def _compare_leaf(
    leaf: str, sides: tuple[StoredValues, StoredValues], exact: bool, result: DiffResult
) -> Iterator[Finding]:
    one, two = (side.catalog.leaves[leaf] for side in sides)
    if one is None and two is None:
        difference = first_difference(*(side.value(leaf) for side in sides))
        if difference is None:
            result.num_identical += 1
        else:
            at, mine, other = difference
            yield Finding(
                kind="value", where=f"{leaf}{at}", what="plain data differs", expected=mine, found=other
            )
    elif one is None or two is None:
        kinds = ["plain data" if entry is None else "a tensor" for entry in (one, two)]
        yield Finding(kind="kind", where=leaf, what="its kind differs", expected=kinds[0], found=kinds[1])
    elif one.sizes != two.sizes:
        sizes = str(one.sizes), str(two.sizes)
        yield Finding(kind="shape", where=leaf, what="its shape differs", expected=sizes[0], found=sizes[1])
    else:
        if one.dtype != two.dtype:
            yield Finding(
                kind="dtype", where=leaf, what="its dtype differs", expected=one.dtype, found=two.dtype
            )
        yield from _compare_values(leaf, one, sides, exact, result)


def _compare_values(
    leaf: str, entry: TensorEntry, sides: tuple[StoredValues, StoredValues], exact: bool, result: DiffResult
) -> Iterator[Finding]:
    comparison = ValueComparison(leaf)
    for box in regions(entry):
        comparison.add(sides[0].tensor(leaf, box), sides[1].tensor(leaf, box), box)
    difference = comparison.result(exact=exact)
    result.num_identical += comparison.is_identical
    if difference is None:
        return
    result.values.append(difference)
    yield Finding(
        kind="value",
        where=leaf,
        what=f"{difference.num_different:,} of {difference.num_elements:,} elements differ",
        expected=f"{difference.first_values[0]!r} at {difference.first_index}",
        found=repr(difference.first_values[1]),
    )


# -- param groups ------------------------------------------------------------------------------------------------------


def _compare_groups(sides: tuple[StoredValues, StoredValues], exact: bool) -> Iterator[Finding]:
    """Each parameter's hyperparameters; one finding for all parameters that differ alike."""
    one, two = (_by_parameter(side.opened) for side in sides)
    alike: defaultdict[tuple[str, str, str, str], list[str]] = defaultdict(list)
    for (optimizer, param), options in one.items():
        others = two.get((optimizer, param))
        for key in sorted({*options, *(others or ())}):
            if others is None or (key in _FLAGS and not exact):
                continue
            mine, other = _text(options, key), _text(others, key)
            if mine != other:
                alike[optimizer, key, mine, other].append(param)
    for (optimizer, key, mine, other), params in alike.items():
        shown = ", ".join(params[:_SHOWN]) + (", ..." if len(params) > _SHOWN else "")
        what = f"a hyperparameter differs for {len(params)} parameters ({shown})"
        yield Finding(
            kind="hyperparameter",
            where=f"{optimizer}.param_groups: {key}",
            what=what,
            expected=mine,
            found=other,
        )
    for number, (mine_only, other_side) in enumerate(((one, two), (two, one))):
        missing = sorted(f"{optimizer}: {param}" for optimizer, param in mine_only.keys() - other_side.keys())
        if missing and other_side:
            what = f"in the param groups of one side only: {', '.join(missing[:_SHOWN])}"
            yield Finding(
                kind="missing" if number == 0 else "unexpected",
                where="param_groups",
                what=what,
                found=f"{len(missing)} parameters",
            )


def _text(options: dict[str, Any], key: str) -> str:
    if key not in options:
        return "nothing"
    value = options[key]
    return repr(list(value) if isinstance(value, tuple) else value)


def _by_parameter(opened: Opened) -> dict[tuple[str, str], dict[str, Any]]:
    return {
        (group.optimizer, param): group.options
        for group in param_groups.groups(opened)
        for param in group.params
    }
