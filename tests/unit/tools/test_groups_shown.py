"""Param groups as `inspect` shows them: what can't be read is noted, and nothing is made up in its place."""

import pytest
import torch
from tests.unit.tools.samples import golden

from orlop import TrainEngine
from orlop.errors import CheckpointCorrupt
from orlop.tools import param_groups
from orlop.tools.opened import Opened
from orlop.tools.plain_records import Described

FAULT = CheckpointCorrupt("a record can't be read", where="here")


def opened(tmp_path, layout):
    return Opened(golden("2.13.0", tmp_path, layout))


def failing(*keys):
    """A reader of leaves to which these hyperparameters can't be read."""

    def read(leaf):
        if leaf.rpartition(".")[2] in keys:
            raise FAULT
        return [leaf] if leaf.endswith(".params") else 1

    return read


@pytest.mark.parametrize("layout", ["nested", "flattened"])
def test_what_can_not_be_read_is_noted_and_left_out(tmp_path, layout):
    checkpoint = opened(tmp_path, layout)
    unread = {}
    groups = param_groups.groups(checkpoint, failing("lr"), unread)
    assert unread == {leaf: FAULT for leaf in checkpoint.catalog.leaves if leaf.endswith(".lr")} != {}
    assert groups == [
        param_groups.Group(
            optimizer=group.optimizer,
            index=group.index,
            params=group.params,
            options={key: value for key, value in group.options.items() if key != "lr"},
        )
        for group in param_groups.groups(checkpoint, failing())
    ]
    with pytest.raises(CheckpointCorrupt):
        param_groups.groups(checkpoint, failing("lr"))


def test_parameters_that_can_not_be_told_are_none(tmp_path):
    checkpoint = opened(tmp_path, "nested")
    unread = {}
    groups = param_groups.groups(checkpoint, failing("params"), unread)
    assert [(group.params, group.options["lr"]) for group in groups] == [([], 1)] * len(unread)
    described = param_groups.groups(checkpoint, lambda leaf: Described("in a form that only torch reads"))
    assert {tuple(group.params) for group in described} == {()}


def test_a_dict_in_a_numbered_group_is_no_parameter(tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.param_groups[0].update(table={"a": {"b": 1}, "c": 2}, whole={100: 1})
    TrainEngine(model, optimizer).save_dcp(tmp_path / "x")
    (group,) = param_groups.groups(Opened(tmp_path / "x"))
    assert group.params == ["weight", "bias"]
    found = {
        key: value for key, value in group.options.items() if key.partition(".")[0] in ("table", "whole")
    }
    assert found == {"table.a.b": 1, "table.c": 2, "whole": {100: 1}}
