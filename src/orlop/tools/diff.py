"""`diff`: what differs between two checkpoints, whatever their world sizes, layouts and writers.

Owns which leaves are held against each other. How values differ is `differences`'; param groups are compared by the
names of their parameters. Needs torch; holds one region of a tensor at a time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from orlop.dcp.catalog import TensorEntry
from orlop.tools import overview
from orlop.tools.differences import Difference, ValueComparison, first_difference
from orlop.tools.findings import Finding, differing
from orlop.tools.hyperparameters import by_parameter, compare_hyperparameters, hyperparameter_leaves
from orlop.tools.opened import Opened
from orlop.tools.stored_values import StoredValues, regions
from orlop.wording import counted

__all__ = ["DiffResult", "diff", "diff_checkpoints"]

_PER_RANK = re.compile(r"(.+)\.rank_\d+")


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
        a: orlop's own, or any DCP directory. Findings call it A.
        b: Likewise; on any other number of ranks. Findings call it B.
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
    groups = [by_parameter(side) for side in sides]
    result.findings += compare_hyperparameters(groups[0], groups[1], exact)
    names = [
        side.catalog.leaves.keys() - hyperparameter_leaves(side, found) for side, found in zip(sides, groups)
    ]
    result.findings += _one_sided(names)
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


def _one_sided(names: list[set[str]]) -> Iterator[Finding]:
    ranks = [{match[0] for leaf in side if (match := _PER_RANK.fullmatch(leaf))} for side in names]
    for number in (0, 1):
        for leaf in sorted(names[number] - names[1 - number]):
            if leaf in ranks[number] and any(_same_part(leaf, one) for one in ranks[1 - number]):
                what = "kept per rank, and the two were saved on other numbers of ranks"
                yield differing("unchecked", leaf, what)
            elif number == 0:
                yield differing("missing", leaf, "in A, not in B")
            else:
                yield differing("unexpected", leaf, "in B, not in A")


def _same_part(one: str, other: str) -> bool:
    return one.rpartition(".")[0] == other.rpartition(".")[0]


def _compare_leaf(
    leaf: str, sides: tuple[StoredValues, StoredValues], exact: bool, result: DiffResult
) -> Iterator[Finding]:
    one, two = (side.catalog.leaves[leaf] for side in sides)
    if one is None and two is None:
        difference = first_difference(*(side.plain(leaf) for side in sides))
        if difference is None:
            result.num_identical += 1
        else:
            at, mine, other = difference
            yield differing("value", f"{leaf}{at}", "plain data differs", mine, other)
    elif one is None or two is None:
        kinds = ["plain data" if entry is None else "a tensor" for entry in (one, two)]
        yield differing("kind", leaf, "its kind differs", *kinds)
    elif one.sizes != two.sizes:
        yield differing("shape", leaf, "its shape differs", str(one.sizes), str(two.sizes))
    else:
        if one.dtype != two.dtype:
            yield differing("dtype", leaf, "its dtype differs", one.dtype, two.dtype)
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
    what = f"differs in {difference.num_different:,} of {counted(difference.num_elements, 'element')}"
    first = f", the first at {list(difference.first_index)}" if difference.first_index else ""
    yield differing("value", leaf, what + first, *map(repr, difference.first_values))
