"""Containers that DCP takes apart come back with the keys and kinds that they had, or are refused by name."""

from collections import Counter, OrderedDict, defaultdict

import pytest
import torch

from orlop import compat
from orlop.errors import CheckpointMismatch
from orlop.state.containers import leaves_of, like_live, number_states


def through_dcp(value):
    """What torch's own flattening gives back."""
    flat, paths = compat.flatten_state_dict({"value": value})
    return compat.unflatten_state_dict(flat, paths).get("value", {})


LIVE = {
    "ints": {1: 0.0, 2: 0.0},
    "floats": {0.5: 0},
    "words": {None: 1, True: 2},
    "tuples": {(1, 2): 3},
    "texts": {"1": 0},
    "counted": Counter({9: 1}),
    "ordered": OrderedDict(b=1, a=2),
    "defaults": defaultdict(list, {3: [1]}),
    "listed": [{1: {}}, {4: [5, {6: 7}]}, {}],
    "leaves": [1, (2, [3]), {4}],
    "nothing": {},
    "deep": {"x": [{}]},
}


def test_a_state_comes_back_through_dcp_as_it_was():
    assert through_dcp(LIVE) != LIVE
    found = like_live(through_dcp(LIVE), LIVE, "part")
    assert found == LIVE
    assert [type(found[name]) for name in ("counted", "ordered", "defaults", "ints")] == [
        Counter,
        OrderedDict,
        defaultdict,
        dict,
    ]
    assert list(found["ordered"]) == ["b", "a"]
    assert found["defaults"]["new"] == []


def test_other_keys_than_the_live_ones_are_of_the_same_kind():
    saved = {"ints": {-7: 1, 10: 2}, "floats": {1.5: 0}, "texts": {"7": 1}, "mixed": {"lr": 1}}
    live = {"ints": {1: 0}, "floats": {0.5: 0}, "texts": {"1": 0}, "mixed": {"eps": 0, 3: 0}}
    assert like_live(through_dcp(saved), live, "part") == saved
    # Nothing there tells, and nothing needs to: they read like no number.
    assert like_live({"a": {"b": 1}}, None, "part") == {"a": {"b": 1}}


@pytest.mark.parametrize(
    "saved, live",
    [
        ({1: 0}, {}),
        ({1: 0}, None),
        ({True: 0}, {}),
        ({0.5: 0}, {}),
        ({None: 0}, {}),
        ({1: 0}, {"lr": 0, 3: 0}),
        ({0.5: 0}, {1: 0}),
        ({"lr": 0}, {1: 0}),
        ({(3, 4): 0}, {(1, 2): 0}),
    ],
    ids=str,
)
def test_keys_whose_kind_nothing_tells_are_refused(saved, live):
    with pytest.raises(CheckpointMismatch, match="every key as text") as caught:
        like_live(through_dcp({"inner": saved}), {"inner": live}, "part")
    assert caught.value.where == "part['inner']"
    assert caught.value.found == repr(str(next(iter(saved))))


def test_a_dict_that_is_gone_may_have_been_empty_and_is_refused():
    live = {"rest": 1, "table": {"a": 1}}
    with pytest.raises(CheckpointMismatch, match="leaves no trace") as caught:
        like_live({"rest": 2}, live, "part")
    assert caught.value.where == "part['table']"
    assert like_live({"rest": 2}, live, "part", keeps_missing=True) == {"rest": 2}
    assert live == {"rest": 1, "table": {"a": 1}}


def test_an_empty_container_is_a_new_one():
    live = {"table": {}}
    found = like_live({}, live, "part")
    assert found == live
    assert found["table"] is not live["table"]


def test_the_keys_of_an_optimizers_state_are_told_by_its_groups():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter])
    fresh = optimizer.state_dict()
    parameter.grad = torch.ones(2)
    optimizer.step()
    found = through_dcp({"inner": optimizer.state_dict()})
    assert list(found["inner"]["state"]) == ["0"]
    number_states(found)
    found = like_live(found, {"inner": fresh}, "part")
    assert list(found["inner"]["state"]) == [0]
    other = torch.optim.AdamW([parameter])
    other.load_state_dict(found["inner"])
    assert other.state[parameter]["step"] == 1


@pytest.mark.parametrize(
    "value",
    [
        {100: 0.1},
        {},
        {"a": {}},
        [{}],
        [{1: 2}],
        {"a.b": 1},
        {"a": {"b.c": 1}},
        {1: 0, "1": 1},
        Counter(a=1),
        OrderedDict(a=1),
        {"a": torch.ones(2), 3: 1},
    ],
    ids=str,
)
def test_what_paths_would_not_give_back_is_one_leaf(value):
    assert leaves_of(value) == {(): value}


def test_what_paths_give_back_is_dcps_own_leaves():
    tensor = torch.ones(2)
    value = {"a": 1, "b": {"c": [1, 2], "d": [tensor, {"e": (3, {})}]}}
    assert leaves_of(value) == {
        ("a",): 1,
        ("b", "c"): [1, 2],
        ("b", "d", 0): tensor,
        ("b", "d", 1, "e"): (3, {}),
    }
    assert leaves_of([1, 2]) == {(): [1, 2]}
    assert leaves_of(tensor) == {(): tensor}
