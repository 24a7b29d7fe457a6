"""Schedulers' lists follow the groups."""

from collections import Counter

import torch

from orlop.state.schedule import GroupOrder, find_order, rates_in_place

STATE = {
    "base_lrs": [1, 2],
    "milestones": Counter([3, 3]),
    "_schedulers": [{"base_lrs": [1, 2], "_last_lr": [0.1, 0.2], "other": [7, 8]}],
}


def test_lists_follow_the_live_groups_also_inside_chained_schedulers():
    got = GroupOrder(order=(1, 0)).arrange(STATE, {})
    assert got["base_lrs"] == [2, 1]
    assert got["milestones"] == Counter([3, 3])
    assert got["_schedulers"] == [{"base_lrs": [2, 1], "_last_lr": [0.2, 0.1], "other": [7, 8]}]


def test_live_rates_are_kept_where_that_was_asked_for():
    live = {"base_lrs": [9, 9], "_schedulers": [{"base_lrs": [9, 9], "_last_lr": [5, 5]}]}
    kept = GroupOrder(order=(0, 1), keeps_rates=True).arrange(STATE, live)
    assert kept["base_lrs"] == [9, 9]
    assert kept["_schedulers"] == [{"base_lrs": [9, 9], "_last_lr": [5, 5], "other": [7, 8]}]


def test_a_group_that_was_not_saved_keeps_what_the_live_scheduler_has_for_it():
    live = {"base_lrs": [7, 8, 9], "_last_lr": [70, 80, 90]}
    state = {"base_lrs": [1, 2], "_last_lr": [10, 20], "milestones": [5, 6]}
    got = GroupOrder(order=(1, None, 0)).arrange(state, live)
    assert got == {"base_lrs": [2, 8, 1], "_last_lr": [20, 80, 10], "milestones": [5, 6]}


def test_the_order_is_found_by_rates_that_stand_on_both_sides():
    groups = [{"lr": 0.3, "initial_lr": 3.0}, {"lr": torch.tensor(0.5), "initial_lr": 1.0}]
    assert find_order({"base_lrs": [1.0, 3.0]}, groups) == (1, 0)
    assert find_order({"base_lrs": [3.0, 1.0]}, groups) == (0, 1)
    assert find_order({"_schedulers": [{"base_lrs": [1.0, 3.0]}]}, groups) == (1, 0)
    # Rates that were set by hand tell nothing, nor does a scheduler without lists.
    assert find_order({"base_lrs": [4.0, 5.0]}, groups) == (0, 1)
    assert find_order(5, groups) == (0, 1)


def test_equal_rates_leave_more_than_one_way():
    groups = [{"initial_lr": 1.0}, {"initial_lr": 2.0}, {"initial_lr": 1.0}]
    assert find_order({"base_lrs": [1.0, 1.0, 2.0]}, groups) is None
    assert find_order({"base_lrs": [1.0, 2.0, 1.0]}, groups) == (0, 1, 2)
    rates = [{**group, "lr": lr} for group, lr in zip(groups, (0.1, 0.2, 0.3))]
    assert find_order({"base_lrs": [1.0, 1.0, 2.0], "_last_lr": [0.3, 0.1, 0.2]}, rates) == (1, 2, 0)


def test_lists_of_more_groups_than_are_here_are_cut():
    assert GroupOrder(order=(2, 0)).arrange({"base_lrs": [1, 2, 3]}, {}) == {"base_lrs": [3, 1]}
    assert find_order({"base_lrs": [1.0, 3.0, 2.0]}, [{"initial_lr": 2.0}, {"initial_lr": 1.0}]) == (2, 0)
    assert find_order({"base_lrs": [1.0, 1.0, 2.0]}, [{"initial_lr": 2.0}, {"initial_lr": 1.0}]) is None


def test_rates_are_as_far_along_as_the_saved_ones():
    saved = {"base_lrs": [1.0, 4.0, 0.0], "_last_lr": [0.5, 1.0, 0.0]}
    live = {"base_lrs": [8.0, 10.0, 1.0, 2.0]}
    assert rates_in_place(saved, live, (1, 0, 2, None)) == (2.0, 5.0, None, None)
    assert rates_in_place({}, live, (0, 1)) == (None, None)
    chained = {"_schedulers": [saved]}
    assert rates_in_place(chained, {"_schedulers": [{"base_lrs": [3.0]}]}, (0,)) == (1.5,)


def test_a_saved_group_that_is_several_now_has_one_rate_for_all_of_them():
    groups = [{"initial_lr": 1.0}, {"initial_lr": 2.0}, {"initial_lr": 1.0}]
    order = find_order({"base_lrs": [2.0, 1.0]}, groups)
    assert order == (1, 0, 1)
    assert GroupOrder(order=order).arrange({"base_lrs": [2.0, 1.0]}, {}) == {"base_lrs": [1.0, 2.0, 1.0]}
    # Set by hand: no telling which is which.
    assert find_order({"base_lrs": [2.0, 5.0]}, groups) is None
    assert find_order({"base_lrs": [2.0]}, [{"lr": 2.0}, {"lr": 2.0}]) is None
