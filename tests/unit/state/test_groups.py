"""Groups are read from both layouts."""

import pytest

from orlop.errors import CheckpointMismatch
from orlop.state.groups import path_below, read_groups


def test_groups_are_read_from_both_of_torchs_layouts():
    nested = {"o.param_groups.0.lr": 1.0, "o.param_groups.0.params": ["a"], "o.param_groups.1.params": ["b"]}
    assert read_groups("o.param_groups.", nested, None, []) == [
        {"lr": 1.0, "params": ["a"]},
        {"params": ["b"]},
    ]
    flat = {
        "o.param_groups.0.weight.lr": 1.0,
        "o.param_groups.0.bias.lr": 1.0,
        "o.param_groups.1.weight.lr": 2.0,
    }
    live = [["0.weight", "0.bias"], ["1.weight"]]
    assert read_groups("o.param_groups.", flat, None, live) == [
        {"lr": 1.0, "params": live[0]},
        {"lr": 2.0, "params": live[1]},
    ]
    with pytest.raises(CheckpointMismatch, match="different hyperparameters"):
        read_groups("o.param_groups.", flat, None, [["0.weight", "1.weight"], ["0.bias"]])
    assert read_groups("o.param_groups.", {"else": 1}, None, live) == []


def test_numbers_in_the_place_of_names_stay_numbers():
    stored = {"o.param_groups.0.params": [0, 1], "o.param_groups.1.params": ["0"]}
    positions, names = read_groups("o.param_groups.", stored, None, [["0", "1"]], lambda names: ["renamed"])
    assert (positions["params"], names["params"]) == ([0, 1], ["renamed"])


@pytest.mark.parametrize(
    "stored",
    [
        {"o.param_groups.0.lr": 1.0, "o.param_groups.0.params": None},
        {"o.param_groups.0.params": ["a"], "o.param_groups.1.lr": 1.0},
        {"o.param_groups": [{"params": "a"}]},
        {"o.param_groups": [None]},
    ],
)
def test_a_group_without_a_list_of_parameters_is_named(stored):
    with pytest.raises(CheckpointMismatch) as caught:
        read_groups("o.param_groups.", stored, None, [["a"]])
    assert caught.value.where in ("o.param_groups.0.params", "o.param_groups.1.params")
    assert caught.value.expected == "a list of names"


def test_paths_come_from_the_checkpoint_where_it_has_them():
    key = "optimizer.param_groups.0.a.b"
    paths = {key: ("optimizer", "param_groups", 0, "a.b")}
    assert path_below(key, "optimizer.param_groups.", paths) == (0, "a.b")
    assert path_below(key, "optimizer.param_groups.", None) == (0, "a", "b")


def test_flattened_groups_stand_in_the_saved_order_where_that_is_on_record():
    flat = {f"o.param_groups.{name}.lr": lr for name, lr in {"a": 1.0, "b": 2.0, "b2": 2.0, "c": 3.0}.items()}

    def read(live, firsts):
        return [group["params"] for group in read_groups("o.param_groups.", flat, None, live, firsts=firsts)]

    assert read([["c"], ["b", "b2"], ["a"]], ["a", "b", "c"]) == [["a"], ["b", "b2"], ["c"]]
    assert read([["c"], ["b", "b2"], ["a"]], []) == [["c"], ["b", "b2"], ["a"]]
    # A group of which nothing is left here keeps its place; a new one has none.
    assert read([["c"], ["new"], ["a"]], ["a", "b", "c"]) == [["a", "b", "b2"], ["b"], ["c"]]
    # Split, although all values are equal: which list of a scheduler belongs to which half is not known.
    with pytest.raises(CheckpointMismatch) as caught:
        read([["a"], ["b"], ["b2"], ["c"]], ["a", "b", "c"])
    assert caught.value.where == "o.param_groups"
    assert "b2" in caught.value.expected
