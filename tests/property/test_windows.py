"""Windows: every element exactly once, the cap kept, cuts where kernels give the same bits."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from orlop.optim.windows import CUT_ELEMENTS, Load, plan_windows

loads = st.lists(
    st.builds(
        Load,
        num_elements=st.integers(0, 5000),
        element_bytes=st.integers(0, 24),
        fixed_bytes=st.integers(0, 400),
        divisible=st.booleans(),
    ),
    max_size=30,
)
caps = st.one_of(st.none(), st.integers(1, 60_000))


@given(loads, caps)
def test_every_element_is_in_exactly_one_piece(given_loads, cap):
    pieces = [piece for window in plan_windows(given_loads, cap) for piece in window.pieces]
    for index, load in enumerate(given_loads):
        mine = [piece for piece in pieces if piece.index == index]
        assert mine[0].start == 0
        assert all(one.stop == other.start for one, other in itertools.pairwise(mine))
        assert mine[-1].stop == load.num_elements
        assert [piece.last for piece in mine] == [False] * (len(mine) - 1) + [True]
        assert all(piece.whole == (len(mine) == 1) for piece in mine)
        assert all(piece.start % CUT_ELEMENTS == 0 for piece in mine)
    assert [piece.index for piece in pieces] == sorted(piece.index for piece in pieces)


@given(loads, st.integers(1, 60_000))
def test_the_cap_is_kept_but_for_what_cannot_be_cut(given_loads, cap):
    for window in plan_windows(given_loads, cap):
        weights = [
            (piece.stop - piece.start) * given_loads[piece.index].element_bytes
            + given_loads[piece.index].fixed_bytes
            for piece in window.pieces
        ]
        assert window.nbytes == sum(weights)
        if window.nbytes > cap:
            assert len(window.pieces) == 1
            load = given_loads[window.pieces[0].index]
            smallest = CUT_ELEMENTS * load.element_bytes + load.fixed_bytes
            assert not load.divisible or window.nbytes <= smallest or load.element_bytes == 0


@given(loads, caps)
def test_equal_arguments_make_equal_plans(given_loads, cap):
    assert plan_windows(given_loads, cap) == plan_windows(list(given_loads), cap)


@given(loads)
def test_without_a_cap_everything_is_in_one_window(given_loads):
    windows = plan_windows(given_loads, None)
    assert len(windows) == (1 if given_loads else 0)
    assert all(piece.whole for window in windows for piece in window.pieces)
