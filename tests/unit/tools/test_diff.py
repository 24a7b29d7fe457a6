"""`diff`: the same is the same whatever wrote it; what differs is named, with the numbers."""

import math

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.unit.tools.samples import data_file, engine, flip, golden, save_large, save_run, train
from tests.unit.tools.test_check import Trap

import orlop
from orlop.dcp.boxes import Box
from orlop.errors import CheckpointCorrupt
from orlop.tools.diff import diff_checkpoints
from orlop.tools.differences import ValueComparison, first_difference


def save(path, **leaves):
    dcp.save({"model": leaves}, checkpoint_id=path)
    return path


def test_layouts_of_one_torch_are_the_same(tmp_path):
    nested = golden("2.13.0", tmp_path)
    result = diff_checkpoints(nested, tmp_path / "flattened", exact=True)
    assert result.findings == []
    assert result.num_identical == result.num_compared == 11


def test_two_versions_differ_in_what_the_older_did_not_know(tmp_path):
    old, new = golden("2.6.0", tmp_path / "old"), golden("2.13.0", tmp_path / "new")
    (found,) = orlop.diff(old, new)
    assert (found.kind, found.expected, found.found) == ("hyperparameter", "nothing", "True")
    assert "decoupled_weight_decay" in found.where


def test_orlop_against_plain_dcp_is_the_same(tmp_path):
    one, two = (save_large(tmp_path / name, by_orlop=name == "orlop") for name in ("plain", "orlop"))
    state = {"a": torch.arange(2**18, dtype=torch.float32)}
    assert [found.where for found in orlop.diff(one, two, exact=True)] == ["model.b"]  # it is random
    assert orlop.diff(save(tmp_path / "x", **state), save(tmp_path / "y", **state)) == []


def test_two_steps_of_a_run(tmp_path):
    run = save_run(tmp_path, (10, 20))
    result = diff_checkpoints(run / "step-00000010", run / "step-00000020")
    assert not result.is_same
    by_leaf = {difference.leaf: difference for difference in result.values}
    step = by_leaf["optimizer.state.first.weight.step"]
    assert (step.first_values, step.max_abs, step.num_different) == ((1.0, 2.0), 1.0, 1)
    assert "model.unused" not in by_leaf
    assert diff_checkpoints(run / "step-00000010", run / "step-00000010", exact=True).is_same


def test_hyperparameters_are_compared_by_the_names_of_parameters(tmp_path):
    for name, lr in (("a", 1e-2), ("b", 3e-2)):
        trained = engine(lr=lr)
        train(trained)
        trained.save_dcp(tmp_path / name)
    found = [each for each in orlop.diff(tmp_path / "a", tmp_path / "b") if each.kind == "hyperparameter"]
    assert [(each.where, each.expected, each.found) for each in found] == [
        ("optimizer.param_groups: lr", "0.01", "0.03")
    ]


def test_shapes_dtypes_kinds_and_one_sided_leaves(tmp_path):
    one = save(
        tmp_path / "a", shape=torch.ones(2), dtype=torch.ones(2), kind=torch.ones(1), only_a=torch.ones(1)
    )
    two = save(
        tmp_path / "b", shape=torch.ones(3), dtype=torch.ones(2).bfloat16(), kind=[1], only_b=torch.ones(1)
    )
    found = {each.where: each.kind for each in orlop.diff(one, two)}
    assert found == {
        "model.shape": "shape",
        "model.dtype": "dtype",
        "model.kind": "kind",
        "model.only_a": "missing",
        "model.only_b": "unexpected",
    }


def test_exact_tells_zeros_apart(tmp_path):
    one, two = (
        save(tmp_path / "a", z=torch.tensor([0.0, math.nan])),
        save(tmp_path / "b", z=torch.tensor([-0.0, math.nan])),
    )
    assert orlop.diff(one, two) == []
    (found,) = orlop.diff(one, two, exact=True)
    assert (found.kind, found.expected, found.found) == ("value", "0.0", "-0.0")


def test_plain_data_is_compared_by_place(tmp_path):
    for name, value in (("a", [1, {"x": 2.0}]), ("b", [1, {"x": 3.0}])):
        dcp.save({"part": {"v": value, "t": torch.ones(1)}}, checkpoint_id=tmp_path / name)
    (found,) = orlop.diff(tmp_path / "a", tmp_path / "b")
    assert found.where.startswith("part.v")
    assert (found.expected, found.found) == ("2.0", "3.0")


NUMBERS = {
    "int": (1, 2),
    "kind": (1, 1.0),
    "bool": (True, False),
    "last-bit": (0.1, 0.1 + 2**-56),
    "zeros": (0.0, -0.0),
    "text": ("a", "b"),
    "none": (None, 0),
    "bytes": (b"a", b"b"),
    "complex": (1 + 2j, 1 - 2j),
    "tuple": ((1, 2), (1, 3)),
    "set": ({1}, {2}),
    "int key": ({1: 0}, {"1": 0}),
    "bool key": ({1: 0}, {True: 0}),
    "dtype": (torch.float32, torch.bfloat16),
    "size": (torch.Size([2]), torch.Size([3])),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_every_kind_of_plain_data_is_compared(tmp_path, name):
    one, two = NUMBERS[name]
    for folder, value in (("a", one), ("b", two), ("c", one)):
        # In a tuple, which DCP keeps as one leaf with whatever is in it.
        dcp.save({"part": {"v": (value, 7), "t": torch.ones(1)}}, checkpoint_id=tmp_path / folder)
    assert diff_checkpoints(tmp_path / "a", tmp_path / "c", exact=True).num_identical == 2
    (found,) = orlop.diff(tmp_path / "a", tmp_path / "b")
    assert (found.kind, found.is_fault) == ("value", True)
    assert found.where.startswith("part.v[0]")
    assert found.expected != found.found


def test_random_generators_are_compared_and_the_first_place_is_named(tmp_path):
    for name, seed in (("a", 1), ("b", 2)):
        trained = engine()
        torch.manual_seed(seed)
        trained.save_dcp(tmp_path / name)
    (found,) = orlop.diff(tmp_path / "a", tmp_path / "b")
    # A generator's state begins with its seed.
    assert found.where == "rng.rank_0['torch']"
    assert str(found).endswith("; A: 5,056 bytes, byte 0 is 0x01; B: 5,056 bytes, byte 0 is 0x02")


def test_long_text_that_differs_late_is_shown_where_it_differs():
    one, two = "x" * 5000 + "a", "x" * 5000 + "b"
    assert first_difference([one], [two]) == ("[0][5000:]", "'a'", "'b'")
    assert first_difference(one.encode(), one.encode() + b"!") == (
        "",
        "5,001 bytes, ending there",
        "5,002 bytes, byte 5,001 is 0x21",
    )
    large, other = torch.zeros(9, 9), torch.zeros(9, 9)
    other[8, 7] = 1.0
    assert first_difference(large, other) == ("[8, 7]", "0.0", "1.0")


def test_what_is_more_than_plain_data_is_compared_by_its_bytes_and_not_executed(tmp_path):
    for name, marker in (("a", "1"), ("b", "2")):
        trap = Trap(str(tmp_path / marker))
        dcp.save({"part": {"v": trap, "t": torch.ones(1)}}, checkpoint_id=tmp_path / name)
    assert diff_checkpoints(tmp_path / "a", tmp_path / "a", exact=True).num_identical == 2
    (found,) = orlop.diff(tmp_path / "a", tmp_path / "b")
    assert (found.kind, found.where) == ("value", "part.v")
    assert "more than plain data (posix.mkdir)" in found.expected
    assert found.expected != found.found
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def with_groups(path, groups, **leaves):
    dcp.save(
        {"optimizer": {"param_groups": groups}, "model": {"a": torch.ones(1), **leaves}}, checkpoint_id=path
    )
    return path


@pytest.mark.parametrize(
    "one, two",
    [
        ([1, {"x": torch.ones(2)}], [1, {"x": torch.zeros(2)}]),
        (torch.tensor(0.5), torch.tensor(0.25)),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0])),
        (0.1, 0.1 + 2**-56),
        ((0.9, 0.999), (0.9, 0.99)),
    ],
)
def test_every_kind_of_hyperparameter_is_compared(tmp_path, one, two):
    for name, value in (("a", one), ("b", two), ("c", one)):
        with_groups(tmp_path / name, [{"odd": value, "params": ["a"]}])
    assert orlop.diff(tmp_path / "a", tmp_path / "c", exact=True) == []
    (found,) = orlop.diff(tmp_path / "a", tmp_path / "b")
    assert found.is_fault
    assert "odd" in found.where


def test_groups_that_name_no_parameters_are_compared_all_the_same(tmp_path):
    for name, lr in (("a", 0.1), ("b", 0.2)):
        with_groups(tmp_path / name, [{"lr": lr}])
    assert [found.where for found in orlop.diff(tmp_path / "a", tmp_path / "b")] == [
        "optimizer.param_groups.0.lr"
    ]


def test_a_module_that_is_called_param_groups_is_compared(tmp_path):
    for name, value in (("a", 1.0), ("b", 2.0)):
        weights = {"0": {"weight": torch.full((3,), value)}}
        dcp.save({"model": {"param_groups": weights, "b": torch.ones(1)}}, checkpoint_id=tmp_path / name)
    (found,) = orlop.diff(tmp_path / "a", tmp_path / "b")
    assert (found.kind, found.where) == ("value", "model.param_groups.0.weight")


def test_implementation_flags_count_only_when_exact(tmp_path):
    for name, flag in (("a", True), ("b", None)):
        with_groups(tmp_path / name, [{"fused": flag, "lr": 1.0, "params": ["a"]}])
    assert orlop.diff(tmp_path / "a", tmp_path / "b") == []
    (found,) = orlop.diff(tmp_path / "a", tmp_path / "b", exact=True)
    assert (found.where, found.expected, found.found) == ("optimizer.param_groups: fused", "True", "None")


def test_a_damaged_side_is_refused(tmp_path):
    one, two = save_large(tmp_path / "a", by_orlop=True), save_large(tmp_path / "b", by_orlop=True)
    flip(data_file(two), 0.4)
    with pytest.raises(CheckpointCorrupt, match="model"):
        orlop.diff(one, two)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_ulps(dtype):
    one = torch.tensor([1.0, -1.0, 0.0], dtype=dtype)
    two = one.clone()
    two[1] = torch.nextafter(one[1], torch.tensor(-2.0, dtype=dtype))
    comparison = ValueComparison("x")
    comparison.add(one, two, Box((4,), (3,)))
    result = comparison.result(exact=False)
    assert (result.max_ulp, result.first_index, result.num_different) == (1, (5,), 1)
    assert result.max_abs == abs(float(one[1]) - float(two[1]))


def test_large_integers_and_infinities():
    comparison = ValueComparison("x")
    comparison.add(torch.tensor([2**62]), torch.tensor([2**62 + 1]), Box((0,), (1,)))
    assert comparison.result(exact=False).first_values == (2**62, 2**62 + 1)
    comparison = ValueComparison("y")
    comparison.add(torch.tensor([math.inf]), torch.tensor([math.nan]), Box((0,), (1,)))
    assert comparison.result(exact=False).max_abs == math.inf


def test_first_difference_of_data():
    assert first_difference({"a": [1, torch.ones(2)]}, {"a": [1, torch.ones(2)]}) is None
    assert first_difference({"a": (1, 2)}, {"a": (1, 3)}) == ("['a'][1]", "2", "3")
    assert first_difference([1], [1.0]) == ("[0]", "int 1", "float 1.0")
    assert first_difference(math.nan, math.nan) is None
    assert first_difference({1: 0}, {"1": 0})[0] == ""


def test_empty_tensors_inside_plain_data_are_equal():
    assert first_difference({"a": torch.empty(0)}, {"a": torch.empty(0)}) is None
    assert first_difference(torch.empty(0, 3), torch.empty(0, 2)) is not None
