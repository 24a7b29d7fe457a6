"""FQNs are free of wrapper segments for every nesting (A30); tied and replaced parameters (A20, A28)."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from orlop.errors import ParameterReplaced
from orlop.state.names import ParameterNames, clean_key, group_names, require_all_named


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x):
        return self.norm(self.module(x))


PLAIN = sorted(nn.Sequential(nn.Linear(2, 2), Block()).state_dict())


def _compile(module):
    return torch.compile(module, backend="eager")


@pytest.mark.parametrize(
    "wrap",
    [
        lambda m: m,
        _compile,
        checkpoint_wrapper,
        lambda m: checkpoint_wrapper(_compile(m)),
        lambda m: _compile(checkpoint_wrapper(m)),
        lambda m: checkpoint_wrapper(_compile(checkpoint_wrapper(m))),
    ],
)
@pytest.mark.parametrize("outer", [lambda m: m, _compile, lambda m: checkpoint_wrapper(_compile(m))])
def test_keys_are_the_plain_names_for_every_nesting(wrap, outer):
    model = outer(nn.Sequential(wrap(nn.Linear(2, 2)), wrap(Block())))
    assert sorted(clean_key(model, key) for key in model.state_dict()) == PLAIN
    assert sorted(ParameterNames.of(model).tensors) == PLAIN


def test_the_first_tied_name_wins_and_the_others_lead_to_it():
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    names = ParameterNames.of(model)
    assert names.fqns[model["a"].weight] == ("a.weight", "b.weight")
    assert names.canonical("b.weight") == "a.weight"
    assert names.canonical("c.weight") == "c.weight"
    assert group_names(names, torch.optim.SGD(model.parameters())) == [["a.weight", "a.bias", "b.bias"]]


def test_parameters_that_are_not_in_the_model_are_named():
    model = nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(model.named_parameters())
    model.weight = nn.Parameter(torch.zeros(3, 2))
    with pytest.raises(ParameterReplaced, match="1 parameter missing in the model") as caught:
        require_all_named(ParameterNames.of(model), {"optimizer": optimizer})
    assert "weight of group 0, shape (3, 2)" in str(caught.value)
