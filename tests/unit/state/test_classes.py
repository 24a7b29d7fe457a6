"""Whose groups they are, told by their options."""

import pytest
import torch
from torch import optim

import orlop
from orlop.state.classes import contradicting_class

CLASSES = {
    optim.SGD: {"momentum": 0.9},
    optim.Adam: {},
    optim.AdamW: {},
    optim.RMSprop: {},
    optim.RAdam: {},
    optim.NAdam: {},
    optim.Adagrad: {},
    optim.Adafactor: {},
    optim.SparseAdam: {},
}


class OwnRule(optim.AdamW):
    """A class of one's own, with an option that its files of last month have not."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        for group in self.param_groups:
            group["cautious"] = True


def make(kind, **options):
    return kind([torch.nn.Parameter(torch.zeros(2))], lr=0.1, **options)


# Torch up to 2.6 says nowhere in a group which of the two it is.
SAYS_WHICH = "decoupled_weight_decay" in make(optim.AdamW).param_groups[0]


@pytest.mark.parametrize("saved", CLASSES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("live", CLASSES, ids=lambda kind: kind.__name__)
def test_torchs_classes_are_told_apart(live, saved):
    if {saved, live} == {optim.Adam, optim.AdamW} and not SAYS_WHICH:
        pytest.skip("this torch's groups don't tell Adam from AdamW")
    writer, reader = make(saved, **CLASSES[saved]), make(live, **CLASSES[live])
    found = contradicting_class(reader, reader.param_groups[0], writer.param_groups[0])
    assert (found is None) == (live is saved), found
    if found is not None:
        assert saved.__name__ in found.split(" or ")


def test_a_host_resident_class_is_its_stock_class():
    swapped = make(orlop.SwapAdamW)
    assert contradicting_class(swapped, swapped.param_groups[0], make(optim.AdamW).param_groups[0]) is None
    found = contradicting_class(
        swapped, swapped.param_groups[0], make(optim.SGD, momentum=0.9).param_groups[0]
    )
    assert found == "SGD"


def test_options_of_ones_own_and_of_newer_versions_contradict_nothing():
    plain = dict(make(optim.AdamW).param_groups[0])
    own = make(OwnRule)
    assert contradicting_class(own, own.param_groups[0], plain) is None
    assert contradicting_class(make(optim.AdamW), plain, {**own.param_groups[0], "name": "x"}) is None
    older = {key: value for key, value in plain.items() if key not in ("maximize", "decoupled_weight_decay")}
    assert contradicting_class(make(optim.AdamW), plain, older) is None
    assert contradicting_class(make(optim.AdamW), plain, {"lr": 1.0, "weight_decay": 0.0}) is None
