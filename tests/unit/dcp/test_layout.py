"""What of a box no chunk holds, and the texts of layouts; placements over real ranks are in tests/dist."""

import pytest
import torch

from orlop.dcp.boxes import Box
from orlop.dcp.layout import describe_layout, local_box, uncovered


@pytest.mark.parametrize(
    "chunks, left",
    [
        ([], [Box((0, 0), (4, 4))]),
        ([Box((0, 0), (4, 4))], []),
        ([Box((0, 0), (2, 4)), Box((2, 0), (2, 4))], []),
        ([Box((0, 0), (2, 4))], [Box((2, 0), (2, 4))]),
        ([Box((1, 1), (2, 2))], None),
        ([Box((0, 0), (0, 4))], [Box((0, 0), (4, 4))]),
    ],
)
def test_what_is_left_is_disjoint_and_whole(chunks, left):
    found = uncovered(Box((0, 0), (4, 4)), chunks)
    assert left is None or found == left
    seen = torch.zeros(4, 4, dtype=torch.int64)
    for box in [*found, *chunks]:
        (row, column), (rows, columns) = box.offsets, box.sizes
        seen[row : row + rows, column : column + columns] += 1
    assert torch.equal(seen, torch.ones_like(seen))


def test_a_scalar_is_covered_by_one_chunk():
    assert uncovered(Box((), ()), []) == [Box((), ())]
    assert uncovered(Box((), ()), [Box((), ())]) == []


def test_a_plain_tensor_is_its_own_box():
    assert local_box("w", torch.ones(2, 3)) == Box((0, 0), (2, 3))
    assert describe_layout(torch.ones(2, 3)) == ""
