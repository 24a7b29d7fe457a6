"""Who has which state, and who gets which back: on plain descriptions of three ranks."""

from types import SimpleNamespace

import pytest

from orlop.dcp.boxes import Box
from orlop.errors import CheckpointMismatch
from orlop.state.uneven import (
    Holding,
    Told,
    check_replicas,
    decide_uneven,
    find_uneven,
    lacks_writer,
    merge_keys,
    record_uneven,
)
from orlop.store.manifest import StateKeys

PLACE = ("optimizer", "w")


def told(scalars):
    """A rank's word: scalars where `w` has state, None where it has none, "elsewhere" where it has no `w`."""
    if scalars == "elsewhere":
        return Told(stepped={"optimizer": {}}, absent={"optimizer": []})
    if scalars is None:
        return Told(stepped={"optimizer": {}}, absent={"optimizer": ["w"]})
    return Told(stepped={"optimizer": {"w": scalars}}, absent={"optimizer": []})


def held(offset):
    return {} if offset is None else {PLACE: Holding(box=Box((offset,), (2,)), layout=f"x=3: {offset}")}


@pytest.mark.parametrize(
    "ranks, uneven",
    [
        (({"step": 1.0}, {"step": 1.0}), False),
        ((None, None), False),
        (({"step": 1.0}, "elsewhere"), False),
        (({"step": 1.0}, None), True),
        (({"step": 1.0}, {"step": 2.0}), True),
    ],
)
def test_only_what_differs_is_uneven(ranks, uneven):
    assert find_uneven([told(each) for each in ranks]) == ([PLACE] if uneven else [])


def test_each_parameter_has_the_keys_that_any_rank_has_of_it():
    ranks = [
        {"a": {"step", "m"}, "b": {"step", "m"}},
        {"b": {"step", "m", "late"}, "c": {"n"}},
        {},
    ]
    everyone = [
        Told(stepped={"o": {fqn: {} for fqn in keys}}, state_keys={"o": StateKeys.of(keys)}) for keys in ranks
    ]
    merged = merge_keys(everyone)["o"]
    assert {fqn: set(merged[fqn]) for fqn in "abc"} == {
        "a": {"step", "m"},
        "b": {"step", "m", "late"},
        "c": {"n"},
    }
    assert merge_keys(everyone[:1]) == {"o": StateKeys(usual=("m", "step"))}


def test_initial_values_are_written_only_where_no_replica_has_real_ones():
    everyone = [told({"step": 1.0}), told(None), told(None)]
    holdings = [held(0), held(0), held(2)]
    assert [lacks_writer(PLACE, rank, everyone, holdings) for rank in range(3)] == [False, False, True]


def test_replicas_that_differ_are_refused_and_shards_are_not():
    everyone = [told({"step": 1.0}), told({"step": 2.0})]
    check_replicas([PLACE], everyone, [held(0), held(2)])
    with pytest.raises(CheckpointMismatch) as caught:
        check_replicas([PLACE], everyone, [held(0), held(0)])
    assert caught.value.where == "optimizer.state.w"
    assert "rank 1" in caught.value.found


def test_each_rank_gets_its_own_back_and_others_are_told():
    everyone = [told({"step": 1.0}), told(None), told({"step": 3.0})]
    holdings = [held(0), held(2), held(4)]
    record = record_uneven([PLACE], everyone, holdings)["optimizer"]["w"]

    def fate(rank, world_size, offset, merge=False):
        ranks = SimpleNamespace(rank=rank, world_size=world_size)
        return decide_uneven(record, held(offset)[PLACE], ranks, merge)

    assert fate(0, 3, 0).scalars == {"step": 1.0}
    assert (fate(1, 3, 2).scalars, fate(1, 3, 2).fault) == (None, None)
    # The same ranks with other parts, or other ranks.
    for elsewhere in (fate(0, 3, 2), fate(0, 2, 0)):
        assert "rank 1: no state" in elsewhere.fault
    merged = fate(0, 2, 0, merge=True)
    assert (merged.scalars, merged.is_merged) == ({"step": 3.0}, True)
