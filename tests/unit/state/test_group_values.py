"""What a saved group changes in a live one: planned first, then written in place."""

import pytest
import torch

from orlop.errors import CheckpointMismatch
from orlop.state.group_values import plan_group, take_over, text_of, write_group


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
        ("lr", "0.5 (torch.float32)", "0.25 (float)"),
        ("betas", "(0.9, 0.9)", "(0.8, 0.9)"),
    }
    write_group(live, values)
    assert live == {**before, "betas": (0.8, 0.9), "initial_lr": 1.0}
    assert live["lr"] is lr
    assert lr.item() == 0.25


def test_a_saved_tensor_becomes_a_number_where_the_live_one_is():
    values, _ = plan_group("optimizer[0]", {"lr": 0.5}, {"lr": torch.tensor(0.25)})
    assert values == {"lr": 0.25}
    values, (difference,) = plan_group("optimizer[0]", {"lr": 0.25}, {"lr": torch.tensor(0.25)})
    assert str(difference) == "optimizer[0] lr: 0.25 (float) -> 0.25 (torch.float32)"
    with pytest.raises(CheckpointMismatch, match="lr"):
        plan_group("optimizer[0]", {"lr": torch.zeros(2)}, {"lr": torch.zeros(3)})


def test_tensors_inside_of_a_hyperparameter_are_filled_too():
    inner = torch.tensor(0.9), torch.tensor(0.99)
    live = {"betas": inner, "table": {"a": torch.zeros(2), "b": 1.0}}
    saved = {
        "betas": (0.5, torch.tensor(0.25)),
        "table": {"a": torch.ones(2), "b": torch.tensor(2.0), "c": 3},
    }
    table = live["table"]["a"]
    values, differences = plan_group("o[0]", live, saved)
    assert [difference.key for difference in differences] == ["betas", "table"]
    assert (inner[0].item(), table.tolist()) == (pytest.approx(0.9), [0, 0])
    write_group(live, values)
    assert live["betas"][0] is inner[0]
    assert live["betas"][1] is inner[1]
    assert [beta.item() for beta in inner] == [0.5, 0.25]
    assert live["table"]["a"] is table
    assert table.tolist() == [1, 1]
    assert (live["table"]["b"], live["table"]["c"]) == (2.0, 3)


def test_numbers_inside_of_a_hyperparameter_stay_numbers():
    values, (difference,) = plan_group("o[0]", {"betas": (0.9, 0.99)}, {"betas": [torch.tensor(0.5), 0.99]})
    assert values == {"betas": [0.5, 0.99]}
    assert type(values["betas"][0]) is float
    assert str(difference) == "o[0] betas: (0.9, 0.99) -> (0.5, 0.99)"


SCALAR, PAIR = torch.tensor(1.0), torch.ones(2)


@pytest.mark.parametrize(
    "held, value, where",
    [
        (SCALAR, None, "o[0] k"),
        (SCALAR, "text", "o[0] k"),
        (SCALAR, [1, 2], "o[0] k"),
        (SCALAR, {"a": 1}, "o[0] k"),
        (SCALAR, torch.ones(3), "o[0] k"),
        (SCALAR, 1j, "o[0] k"),
        (SCALAR, torch.tensor(1j), "o[0] k"),
        (PAIR, 0.5, "o[0] k"),
        (PAIR, torch.tensor(0.5), "o[0] k"),
        ((SCALAR, SCALAR), (0.5, None), "o[0] k[1]"),
        ((SCALAR, SCALAR), [0.5], "o[0] k"),
        ((SCALAR, SCALAR), 0.5, "o[0] k"),
        ({"a": SCALAR}, {"a": "text"}, "o[0] k['a']"),
    ],
    ids=str,
)
def test_what_a_live_tensor_cannot_hold_is_refused_by_name(held, value, where):
    live = {"k": held}
    with pytest.raises(CheckpointMismatch, match="of another kind") as caught:
        plan_group("o[0]", live, {"k": value})
    assert caught.value.where == where
    assert live == {"k": held}
    # What is only told needs no room.
    _, differences = plan_group("o[0]", live, {"k": value}, taken=False)
    assert [difference.key for difference in differences] == ["k"]


def test_a_tensor_of_one_element_takes_a_number_whatever_its_shape():
    for held in (torch.zeros(()), torch.zeros(1), torch.zeros(1, 1)):
        live = {"k": held}
        for value in (2, True, 0.5, torch.tensor(3.0)):
            write_group(live, plan_group("o[0]", live, {"k": value})[0])
            assert live["k"] is held
            assert held.item() == float(value)


def test_kinds_of_value_that_read_alike_are_told():
    _, differences = plan_group("o[0]", {"k": 5, "n": None, "t": ("1",)}, {"k": "5", "n": "None", "t": (1,)})
    assert [str(difference) for difference in differences] == [
        "o[0] k: 5 (int) -> 5 (str)",
        "o[0] n: None (NoneType) -> None (str)",
        "o[0] t: ('1') -> (1)",
    ]


def test_tensors_of_several_elements_are_told_apart_by_what_is_in_them():
    for size in (2, 100):
        live, saved = {"k": torch.zeros(size)}, {"k": torch.zeros(size)}
        assert plan_group("o[0]", live, saved)[1] == []
        saved["k"][-1] = 1
        assert len(plan_group("o[0]", live, saved)[1]) == 1
    assert text_of({"a": torch.zeros(2), "b": "x"}) == "{'a': [0.0, 0.0], tensor of shape (2,), 'b': 'x'}"


def test_a_group_that_torch_made_anew_is_taken_over_in_place():
    lr, other = torch.tensor(0.5), torch.tensor(0.25)
    live = {"params": ["old"], "lr": lr, "kind": other, "gone": 1}
    take_over(live, {"params": ["new"], "lr": 0.75, "kind": "text", "more": 2})
    assert live == {"params": ["old"], "lr": lr, "kind": "text", "more": 2}
    assert live["lr"] is lr
    assert lr.item() == 0.75
