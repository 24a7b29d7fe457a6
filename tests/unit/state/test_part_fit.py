"""What torch's own kinds of parts would refuse is told beforehand, and nothing else is."""

import copy

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim.swa_utils import AveragedModel

from orlop.state.part_fit import find_misfit


def net(width=3):
    return nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width))


class Renames(nn.Linear):
    def _load_from_state_dict(self, state_dict, prefix, *rest):
        state_dict[f"{prefix}weight"] = state_dict.pop(f"{prefix}kernel")
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Asked:
    def check_state_dict(self, state):
        return "no" if state else ""


def without(state, key):
    return {name: value for name, value in state.items() if name != key}


@pytest.mark.parametrize(
    ("part", "state", "misfit"),
    [
        (net(), net().state_dict(), ""),
        (AveragedModel(net()), AveragedModel(net()).state_dict(), ""),
        (net(), {**net().state_dict(), "more": torch.zeros(1)}, "1 entry more than here: more"),
        (net(), without(net().state_dict(), "0.bias"), "1 entry missing: 0.bias"),
        (net(), {}, "7 entries missing: 0.weight, 0.bias, 1.weight, …"),
        (net(), net(4).state_dict(), "0.weight: expected (3, 2), found (4, 2)"),
        (net(), [1], "a module's state is a dict, and list was saved"),
        (GradScaler("cpu"), {}, "saved by a GradScaler that was disabled, and it is enabled here"),
        (GradScaler("cpu"), GradScaler("cpu").state_dict(), ""),
        (GradScaler("cpu", enabled=False), GradScaler("cpu").state_dict(), ""),
        (Asked(), {1: 2}, "no"),
        (Asked(), {}, ""),
        (object(), {}, ""),
    ],
)
def test_a_misfit_is_found_where_the_part_itself_would_refuse(part, state, misfit):
    before = copy.deepcopy(part.state_dict()) if hasattr(part, "state_dict") else None
    assert find_misfit(part, state) == misfit
    if before is None:
        return
    for key, value in before.items():
        assert torch.equal(torch.as_tensor(part.state_dict()[key]), torch.as_tensor(value))
    if misfit:
        with pytest.raises((RuntimeError, TypeError)):
            part.load_state_dict(state)
    else:
        part.load_state_dict(state)


def test_who_loads_in_a_way_of_its_own_is_believed():
    part = nn.Sequential(Renames(2, 3))
    state = {"0.kernel": torch.zeros(3, 2), "0.bias": torch.zeros(3)}
    assert find_misfit(part, state) == ""
    part.load_state_dict(state)
