"""Plain data passes and comes back by `weights_only`; everything else is refused by name."""

import enum
import io
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch

from orlop.errors import CheckpointUnsafe
from orlop.state.plain import digest, plain


class Colour(enum.IntEnum):
    RED = 3


DATA = {
    "none": None,
    "numbers": (1, 2.5, True, 1j, float("inf")),
    "texts": ["a", b"b", {"x"}],
    "tensor": torch.arange(3),
    "torch": (torch.float32, torch.device("cpu"), torch.Size([2])),
    "ordered": OrderedDict(a=1),
    "milestones": Counter([3, 3, 5]),
    7: {"deep": [torch.tensor(1.0)]},
}


def test_plain_data_is_read_back_without_running_code():
    buffer = io.BytesIO()
    torch.save(plain(DATA, "part"), buffer)
    buffer.seek(0)
    back = torch.load(buffer, weights_only=True)
    assert digest(back) == digest(DATA)
    assert back["milestones"] == Counter([3, 3, 5])


def test_subclasses_and_numpy_scalars_become_plain():
    got = plain({"c": Colour.RED, "f": np.float64(0.1), "i": np.int64(7), "b": np.bool_(True)}, "part")
    assert [(type(v), v) for v in got.values()] == [(int, 3), (float, 0.1), (int, 7), (bool, True)]


@pytest.mark.parametrize("value", [np.arange(3), object(), lambda: 0, io.BytesIO()])
def test_what_is_not_plain_is_refused_with_its_place(value):
    with pytest.raises(CheckpointUnsafe) as caught:
        plain({"a": [0, value]}, "data")
    assert caught.value.where == "data['a'][1]"
    assert type(value).__name__ in caught.value.found


def test_a_view_does_not_drag_its_storage_along():
    assert plain(torch.zeros(1000)[:3], "part").untyped_storage().nbytes() == 12


def test_digests_tell_values_apart_but_not_orders():
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    for one, other in [
        (1, 1.0),
        (0.0, -0.0),
        ([1, 2], (1, 2)),
        ([1], [1, 1]),
        ("1", 1),
        (torch.zeros(2), torch.zeros(3)),
    ]:
        assert digest(one) != digest(other)
