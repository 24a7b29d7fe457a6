"""What a save writes of param groups comes back as it was, and what could not is refused before a byte is written."""

from collections import OrderedDict
from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict

from orlop import LoadPolicy, TrainEngine
from orlop.errors import CheckpointMismatch, OptimizerRefused

VALUES = {
    "numbers": {100: 0.1},
    "empty": {},
    "inside": {"a": {"b": {}}, "c": 1},
    "listed": [{}, {1: 2}],
    "dotted": {"a.b": 1},
    "both": {"1": 1, 1: 2},
    "ordered": OrderedDict(b=1, a=2),
    "plain": {"a": {"b": [1, 2]}, "t": torch.ones(2)},
    "pair": (1, {2: 3}),
}
STALE = {
    "numbers": {100: 0.5, "x": 1},
    "empty": {"stale": 1},
    "inside": {"a": {"b": {"c": 2}}},
    "listed": [],
    "dotted": {},
    "both": None,
    "ordered": {},
    "plain": {"a": {}, "t": torch.zeros(2)},
    "pair": (),
}


def make(seed=0, model=None, **values):
    torch.manual_seed(seed)
    model = nn.Linear(2, 2) if model is None else model
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.param_groups[0].update(values)
    return TrainEngine(model, optimizer)


def train(engine):
    for param in engine.model.parameters():
        param.grad = torch.randn_like(param)
    engine.optimizers["optimizer"].step()
    return engine


def group_of(engine):
    return engine.optimizers["optimizer"].param_groups[0]


def save_by_torch(engine, path):
    model, state = get_state_dict(engine.model, engine.optimizers["optimizer"])
    dcp.save({"model": model, "optimizer": state}, checkpoint_id=path)


def refused(engine, act, *, kind=CheckpointMismatch):
    """The error, and that nothing changed."""
    weights = [param.detach().clone() for param in engine.model.parameters()]
    group = {key: value for key, value in group_of(engine).items() if key != "params"}
    with pytest.raises(kind) as caught:
        act()
    assert all(map(torch.equal, weights, engine.model.parameters()))
    assert {key: value for key, value in group_of(engine).items() if key != "params"} == group
    return caught.value


@pytest.mark.parametrize("stale", [STALE, dict.fromkeys(STALE, 7), {}], ids=["other", "numbers", "none"])
@pytest.mark.parametrize("layout", ["nested", "flattened"])
def test_values_of_groups_come_back_as_they_were(tmp_path, layout, stale):
    train(make(**VALUES)).save_dcp(tmp_path / "x", optimizer_layout=layout)
    engine = make(1, **stale)
    report = engine.load_dcp(tmp_path / "x")
    found = {key: group_of(engine)[key] for key in VALUES}
    tensor = found["plain"].pop("t")
    expected = {**VALUES, "plain": {"a": {"b": [1, 2]}}}
    assert tensor.tolist() == [1, 1]
    assert found == expected
    assert [type(found[key]) for key in found] == [type(expected[key]) for key in found]
    assert {difference.key for difference in report.differences} == set(stale)


def test_what_torch_takes_apart_without_loss_keeps_torchs_keys(tmp_path):
    make(**VALUES).save_dcp(tmp_path / "x")
    keys = FileSystemReader(tmp_path / "x").read_metadata().state_dict_metadata
    prefix = "optimizer.param_groups.0."
    mine = {key.removeprefix(prefix) for key in keys if key.startswith(prefix)}
    assert {name for name in mine if name.split(".")[0] in VALUES} == {
        *(name for name in VALUES if name != "plain"),
        "plain.a.b",
        "plain.t",
    }


def test_values_of_groups_in_a_file_of_torchs_have_the_live_keys(tmp_path):
    save_by_torch(train(make(numbers={100: 0.1, 7: 1}, empty={})), tmp_path / "x")
    engine = make(1, numbers={100: 0.5}, empty={})
    engine.load_dcp(tmp_path / "x")
    assert group_of(engine)["numbers"] == {100: 0.1, 7: 1}
    assert group_of(engine)["empty"] == {}


def test_a_value_that_a_file_of_torchs_does_not_tell_is_refused(tmp_path):
    save_by_torch(train(make(numbers={100: 0.1}, empty={})), tmp_path / "x")
    engine = make(1, numbers={}, empty={})
    error = refused(engine, lambda: engine.load_dcp(tmp_path / "x"))
    assert "kind: optimizer[0]['numbers'] (DCP writes every key as text" in error.found
    engine.load_dcp(tmp_path / "x", load_args=False)
    assert group_of(engine)["numbers"] == {}
    engine = make(1, numbers={1: 0}, empty={"stale": 1})
    error = refused(engine, lambda: engine.load_dcp(tmp_path / "x"))
    assert "kind: optimizer[0]['empty'] (an empty dict leaves no trace" in error.found
    engine.load_dcp(tmp_path / "x", policy=LoadPolicy(allow_missing=True))
    assert group_of(engine)["empty"] == {"stale": 1}


@pytest.mark.parametrize(
    "layout, key", [("flattened", "a.b"), ("flattened", 3), ("nested", 3), ("nested", None)]
)
def test_keys_of_groups_that_no_file_could_give_back_are_refused_when_saving(tmp_path, layout, key):
    engine = make()
    group_of(engine)[key] = 1
    error = refused(
        engine, lambda: engine.save_dcp(tmp_path / "x", optimizer_layout=layout), kind=OptimizerRefused
    )
    assert (error.where, error.found) == ("optimizer, group 0", repr(key))
    assert not (tmp_path / "x").exists()


def test_a_key_with_a_dot_has_a_place_in_the_nested_layout(tmp_path):
    make(**{"a.b": 1}).save_dcp(tmp_path / "x")
    engine = make(1)
    engine.load_dcp(tmp_path / "x")
    assert group_of(engine)["a.b"] == 1


class Part:
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize("name", ["model.z", "optimizer.state", "x.y"])
def test_a_part_whose_keys_would_be_anothers_is_refused(tmp_path, name):
    parts = {"x": Part(), name: Part()}
    model = nn.Linear(2, 2)
    with pytest.raises(CheckpointMismatch, match="would begin as those of another do") as caught:
        TrainEngine(model, torch.optim.SGD(model.parameters()), parts=parts)
    assert caught.value.where == name
    engine = make()
    engine.parts.update(parts)
    error = refused(engine, lambda: engine.save_dcp(tmp_path / "x"))
    assert (error.where, error.expected) == (
        name,
        f"a name that does not begin with {name.split('.')[0] + '.'!r}",
    )
    assert not (tmp_path / "x").exists()


def test_optimizers_whose_keys_would_be_anothers_are_refused():
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    optimizers = [torch.optim.SGD(layer.parameters()) for layer in model]
    with pytest.raises(CheckpointMismatch, match=r"where: opt\.state"):
        TrainEngine(model, dict(zip(("opt", "opt.state"), optimizers)))
    TrainEngine(model, dict(zip(("opt", "opt_state.x"), optimizers)))


class Digits(nn.Module):
    """Its parameters are called 1 and 0, in that order."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        for name in ("1", "0"):
            self.register_parameter(name, nn.Parameter(torch.randn(3)))


@pytest.mark.parametrize("kind", ["optimizer", "list"])
@pytest.mark.parametrize("options", [{}, {"load_args": False}, {"load_states": False}], ids=str)
def test_positions_are_refused_even_where_parameters_are_called_by_digits(tmp_path, options, kind):
    def model(seed):
        return Digits(seed) if kind == "optimizer" else nn.ParameterList([torch.randn(3), torch.randn(3)])

    first = train(make(model=model(0)))
    raw = {"model": first.model.state_dict(), "optimizer": first.optimizers["optimizer"].state_dict()}
    dcp.save(raw, checkpoint_id=tmp_path / "raw")
    engine = make(model=model(1))
    for policy in (None, LoadPolicy(allow_missing=True, allow_unexpected=True)):
        load = partial(engine.load_dcp, tmp_path / "raw", policy=policy, **options)
        error = refused(engine, load)
        assert "layout: optimizer.param_groups (they name parameters by their position" in error.found
        assert not engine.optimizers["optimizer"].state
    # By name they load.
    first.save_dcp(tmp_path / "named")
    engine.load_dcp(tmp_path / "named")
    for ours, theirs in zip(engine.model.parameters(), first.model.parameters()):
        moments = [e.optimizers["optimizer"].state for e in (engine, first)]
        assert torch.equal(moments[0][ours]["exp_avg"], moments[1][theirs]["exp_avg"])
