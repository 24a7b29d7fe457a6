"""Modules' extra state: written as torch writes it, and read in either form."""

import warnings
from collections import OrderedDict

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.rewriting import keys, rewrite
from torch import nn

import orlop
from orlop.engine import TrainEngine
from orlop.errors import CheckpointMismatch
from orlop.resume import LoadPolicy
from orlop.state.fingerprint import fingerprint
from orlop.state.plain import digest


class Remembers(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.value = value

    def get_extra_state(self):
        return self.value

    def set_extra_state(self, state):
        self.value = state


def make(value):
    model = nn.Sequential(nn.Linear(2, 2), Remembers(value))
    return TrainEngine(model, torch.optim.SGD(model[0].parameters(), lr=0.1))


def save_as_torch(engine, path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": engine.model.state_dict()}, checkpoint_id=path)


def leaves(path):
    return {key.partition("_extra_state")[2] for key in keys(path) if "_extra_state" in key}


NESTED = {
    "b": 1,
    "a": {"t": torch.ones(2), "n": None},
    "l": [1, 2],
    "0": "zero",
    "ts": [torch.zeros(1), {"x": 2}],
}


def test_a_nested_one_has_the_leaves_that_torch_makes_of_it(tmp_path):
    engine = make(NESTED)
    engine.save_dcp(tmp_path / "x")
    save_as_torch(engine, tmp_path / "y")
    assert leaves(tmp_path / "x") == leaves(tmp_path / "y")
    assert leaves(tmp_path / "x") == {".b", ".a.t", ".a.n", ".l", ".0", ".ts.0", ".ts.1.x"}
    other = make(
        dict.fromkeys(NESTED) | {"a": {"t": torch.zeros(2), "n": 0}, "ts": [torch.ones(1), {"x": 0}]}
    )
    state = {"model": other.model.state_dict()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=tmp_path / "x")
    assert digest(state["model"]["1._extra_state"]) == digest(NESTED)


@pytest.mark.parametrize(
    "value",
    [
        NESTED,
        {},
        {"a": {}},
        {"a": []},
        {1: "one", 2: torch.ones(1)},
        {1: "one", "1": "text"},
        {"a.b": 1, "a": {"b": 2}},
        OrderedDict(b=1, a=2),
        [torch.ones(1), 2],
        [],
        (torch.ones(1), {"a": 1}),
        torch.arange(3),
        None,
    ],
    ids=str,
)
@pytest.mark.parametrize("live", [None, {}, {"other": {"x": 1}}, torch.zeros(1)], ids=str)
def test_what_was_saved_is_given_back(tmp_path, value, live):
    first, second = make(value), make(live)
    first.save_dcp(tmp_path / "x")
    second.load_dcp(tmp_path / "x")
    assert type(second.model[1].value) is type(value)
    assert digest(second.model[1].value) == digest(value)
    assert orlop.fingerprint(tmp_path / "x") == fingerprint(second)
    assert orlop.verify(tmp_path / "x") == []


def test_the_order_of_keys_stays(tmp_path):
    first, second = make(NESTED), make(None)
    first.save_dcp(tmp_path / "x")
    second.load_dcp(tmp_path / "x")
    assert list(second.model[1].value) == list(NESTED)


def test_one_leaf_as_older_versions_wrote_it_is_read(tmp_path):
    first, second = make(NESTED), make({"b": 0})
    first.save_dcp(tmp_path / "x")

    def join(flat):
        for key in [key for key in flat if "_extra_state" in key]:
            del flat[key]
        flat["model.1._extra_state"] = NESTED

    rewrite(tmp_path / "x", join)
    assert leaves(tmp_path / "x") == {""}
    second.load_dcp(tmp_path / "x")
    assert digest(second.model[1].value) == digest(NESTED)


@pytest.mark.parametrize(
    ("value", "live"),
    [
        (NESTED, NESTED),
        ({1: "one", 2: torch.ones(1)}, {1: "", 2: torch.zeros(1)}),
        (OrderedDict(b=1, a={}), OrderedDict(b=0, a={})),
        ({}, {}),
    ],
    ids=str,
)
def test_plain_dcp_files_are_read_with_the_live_kinds(tmp_path, value, live):
    first, second = make(value), make(live)
    save_as_torch(first, tmp_path / "x")
    report = second.load_dcp(tmp_path / "x")
    assert digest(second.model[1].value) == digest(value)
    assert not report.of("ignored", "kept")
    assert torch.equal(first.model[0].weight, second.model[0].weight)


def test_what_plain_dcp_lost_is_not_made_up(tmp_path):
    save_as_torch(make({"a": {}, "b": 1}), tmp_path / "x")
    engine = make({"a": {"kept": 1}, "b": 0})
    weight = engine.model[0].weight.clone()
    with pytest.raises(CheckpointMismatch, match=r"leaves no trace.*\n.*model\.1\._extra_state\['a'\]"):
        engine.load_dcp(tmp_path / "x")
    assert engine.model[1].value == {"a": {"kept": 1}, "b": 0}
    assert torch.equal(engine.model[0].weight, weight)


def test_leaves_of_one_that_is_not_here_are_unexpected(tmp_path):
    make(NESTED).save_dcp(tmp_path / "x")
    model = nn.Sequential(nn.Linear(2, 2))
    engine = TrainEngine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(CheckpointMismatch, match=r"unexpected: model\.1\._extra_state\.a\.t"):
        engine.load_dcp(tmp_path / "x")
    report = engine.load_dcp(tmp_path / "x", policy=LoadPolicy(allow_unexpected=True))
    assert len(report.of("ignored")) == 7


def test_extra_state_alone_is_no_common_name(tmp_path):
    save_as_torch(make({}), tmp_path / "x")
    rewrite(
        tmp_path / "x",
        lambda flat: flat.update({f"{k}.other": flat.pop(k) for k in list(flat)}),
        keep_record=False,
    )
    engine = make({})
    with pytest.raises(CheckpointMismatch, match=r"layout: model"):
        engine.load_dcp(tmp_path / "x", policy=LoadPolicy(allow_missing=True, allow_unexpected=True))
