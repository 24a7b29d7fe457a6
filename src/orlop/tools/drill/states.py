"""The state in two runs' last checkpoints: its fingerprints, and how a leaf of them differs.

Needs torch. Must not know how the runs went.
"""

from __future__ import annotations

import os

from orlop.tools.differences import ValueComparison, first_difference
from orlop.tools.fingerprints import stored_fingerprint
from orlop.tools.opened import Opened
from orlop.tools.stored_values import StoredValues, regions
from orlop.wording import counted

__all__ = ["describe_difference", "fingerprint_of"]


def fingerprint_of(checkpoint: str | os.PathLike[str]) -> dict[str, str]:
    """The digest of each leaf."""
    return dict(stored_fingerprint(checkpoint).leaves)


def describe_difference(one: str | os.PathLike[str], two: str | os.PathLike[str], leaf: str) -> str:
    """Where and how a leaf that two checkpoints have differs between them, for people."""
    sides = [StoredValues(Opened(path)) for path in (one, two)]
    entries = [side.catalog.leaves.get(leaf, side) for side in sides]
    if any(entry is side for entry, side in zip(entries, sides)):
        return f"{leaf}: in one of the checkpoints only"
    if entries[0] is None and entries[1] is None:
        found = first_difference(*(side.value(leaf) for side in sides))
        return leaf if found is None else f"{leaf}{found[0]}: {found[1]} and {found[2]}"
    if entries[0] is None or entries[1] is None or sides[0].entry(leaf).sizes != sides[1].entry(leaf).sizes:
        return f"{leaf}: of other kinds or shapes"
    comparison = ValueComparison(leaf)
    for box in regions(sides[0].entry(leaf)):
        comparison.add(sides[0].tensor(leaf, box), sides[1].tensor(leaf, box), box)
    difference = comparison.result(exact=True)
    if difference is None:
        return leaf
    values = " and ".join(map(repr, difference.first_values))
    return (
        f"{leaf}: {difference.num_different:,} of {counted(difference.num_elements, 'element')}, the first at "
        f"{list(difference.first_index)}: {values}"
    )
