import itertools
from collections import Counter

import pytest

from orlop.dcp.boxes import Box, is_run, overlap, pieces, row_major, tiling_fault


def elements(box):
    return itertools.product(*(range(o, o + s) for o, s in zip(box.offsets, box.sizes)))


def test_overlap_is_what_both_hold():
    a, b = Box((0, 2), (4, 4)), Box((2, 0), (4, 4))
    assert overlap(a, b) == Box((2, 2), (2, 2))
    assert overlap(a, Box((4, 0), (1, 9))) is None
    assert overlap(Box((), ()), Box((), ())) == Box((), ())


@pytest.mark.parametrize(
    "shape, boxes, kind",
    [
        ((4,), [((0,), (2,)), ((2,), (2,))], None),
        ((), [((), ())], None),
        ((0, 3), [], None),
        ((0, 3), [((0, 0), (0, 3))], None),
        ((4, 4), [((0, 0), (2, 2)), ((2, 2), (2, 2)), ((0, 2), (2, 2)), ((2, 0), (2, 2))], None),
        ((4,), [((0,), (2,))], "gap"),
        ((4,), [((0,), (2,)), ((1,), (2,))], "overlap"),  # and a gap: the volume is right
        ((4,), [((0,), (4,)), ((1,), (2,))], "overlap"),
        ((4,), [((0,), (4,)), ((0,), (4,))], "overlap"),
        ((4,), [((3,), (2,))], "outside"),
        ((4,), [((0, 0), (4, 1))], "outside"),
        ((2,) * 13, [((0,) * 13, (1,) * 13)] * 2**13, "overlap"),  # cut along more axes than anybody does
    ],
)
def test_tiling_is_proven_or_the_fault_named(shape, boxes, kind):
    fault = tiling_fault(shape, [Box(*box) for box in boxes])
    assert (fault and fault.kind) == kind


def test_tiling_of_many_boxes_is_linear_work():
    # Half cut along one axis, half along the other: a sweep along either would compare all with all.
    count = 20_000
    boxes = [Box((row, 0), (1, 1)) for row in range(count)]
    boxes += [Box((0, 1 + column), (count, 1)) for column in range(count)]
    assert tiling_fault((count, 1 + count), boxes) is None
    assert tiling_fault((count, 1 + count), [*boxes[1:], boxes[1]]).kind == "overlap"


@pytest.mark.parametrize("sizes", [(), (7,), (3, 5), (4, 3, 5), (2, 1, 3, 4)])
@pytest.mark.parametrize("most, gap", [(1, 0), (8, 0), (64, 4), (10**9, 10**9), (40, 8)])
def test_pieces_cover_the_box_once_in_order_and_hold_their_bytes(sizes, most, gap):
    item = 4
    strides = row_major(sizes)
    ranges = [[(o, s) for o in range(n) for s in range(1, n - o + 1)] for n in sizes]
    for corner in itertools.islice(itertools.product(*ranges), 0, None, 7):
        box = Box(tuple(o for o, _ in corner), tuple(s for _, s in corner))
        found = list(pieces(sizes, box, item, most, gap))
        assert Counter(e for piece in found for e in elements(piece.box)) == Counter(elements(box))
        assert all(a.stop <= b.start for a, b in itertools.pairwise(found))
        for piece in found:
            places = [sum(i * s for i, s in zip(e, strides)) * item for e in elements(piece.box)]
            assert (piece.start, piece.stop) == (min(places), max(places) + item)
            assert piece.stop - piece.start <= max(most, item)
            gaps = [b - a - item for a, b in itertools.pairwise(sorted(places))]
            assert max(gaps, default=0) <= gap
        if most > 10**6 and (gap > 10**6 or is_run(sizes, box)):
            assert len(found) == 1


def test_a_run_is_a_run():
    assert is_run((4, 6), Box((1, 0), (2, 6)))
    assert is_run((4, 6), Box((1, 2), (1, 3)))
    assert not is_run((4, 6), Box((1, 2), (2, 3)))
