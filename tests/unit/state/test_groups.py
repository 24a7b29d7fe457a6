"""Groups are matched by names and written in place; schedulers' lists follow."""

from collections import Counter

import pytest
import torch

from orlop.errors import CheckpointMismatch
from orlop.state.groups import (
    match_groups,
    path_below,
    permute_scheduler,
    plan_group,
    read_groups,
    write_group,
)


def test_groups_match_by_the_set_of_names():
    assert match_groups([["a"], ["b", "c"], []], [["c", "b"], [], ["a"]], "optimizer") == [2, 0, 1]
    assert match_groups([[], []], [[], []], "optimizer") == [0, 1]


@pytest.mark.parametrize(
    "live, saved",
    [
        ([["a"], ["b"]], [["a", "b"]]),
        ([["a"]], [["a"], ["b"]]),
        ([["a"], ["b"]], [["a"]]),
        ([["a"]], [["b"]]),
    ],
)
def test_a_group_without_a_partner_is_refused(live, saved):
    with pytest.raises(CheckpointMismatch) as caught:
        match_groups(live, saved, "optimizer")
    assert caught.value.where == "optimizer"
    assert "group 0: " in caught.value.expected
    assert "group 0: " in caught.value.found


def test_planning_changes_nothing_and_writing_keeps_objects():
    lr = torch.tensor(0.5)
    live = {"params": [1], "lr": lr, "betas": (0.9, 0.9), "eps": 1e-8, "foreach": True, "own": 3}
    saved = {
        "params": ["a"],
        "lr": 0.25,
        "betas": (0.8, 0.9),
        "eps": 1e-8,
        "foreach": False,
        "initial_lr": 1.0,
    }
    before = dict(live)
    values, differences = plan_group("optimizer[0]", live, saved)
    assert live == before
    assert {(d.key, d.live, d.saved) for d in differences} == {
        ("lr", "0.5", "0.25"),
        ("betas", "(0.9, 0.9)", "(0.8, 0.9)"),
    }
    write_group(live, values)
    assert live == {**before, "betas": (0.8, 0.9), "initial_lr": 1.0}
    assert live["lr"] is lr
    assert lr.item() == 0.25


def test_a_saved_tensor_becomes_a_number_where_the_live_one_is():
    values, _ = plan_group("optimizer[0]", {"lr": 0.5}, {"lr": torch.tensor(0.25)})
    assert values == {"lr": 0.25}
    with pytest.raises(CheckpointMismatch, match="lr"):
        plan_group("optimizer[0]", {"lr": torch.zeros(2)}, {"lr": torch.zeros(3)})


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


def test_paths_come_from_the_checkpoint_where_it_has_them():
    key = "optimizer.param_groups.0.a.b"
    paths = {key: ("optimizer", "param_groups", 0, "a.b")}
    assert path_below(key, "optimizer.param_groups.", paths) == (0, "a.b")
    assert path_below(key, "optimizer.param_groups.", None) == (0, "a", "b")


def test_a_schedulers_lists_follow_the_live_groups_also_inside_chained_ones():
    state = {
        "base_lrs": [1, 2],
        "milestones": Counter([3, 3]),
        "_schedulers": [{"base_lrs": [1, 2], "_last_lr": [0.1, 0.2], "other": [7, 8]}],
    }
    got = permute_scheduler(state, [1, 0])
    assert got["base_lrs"] == [2, 1]
    assert got["milestones"] == Counter([3, 3])
    assert got["_schedulers"] == [{"base_lrs": [2, 1], "_last_lr": [0.2, 0.1], "other": [7, 8]}]
    live = {"base_lrs": [9, 9], "_schedulers": [{"base_lrs": [9, 9], "_last_lr": [5, 5]}]}
    kept = permute_scheduler(state, [0, 1], live)
    assert kept["base_lrs"] == [9, 9]
    assert kept["_schedulers"] == [{"base_lrs": [9, 9], "_last_lr": [5, 5], "other": [7, 8]}]
