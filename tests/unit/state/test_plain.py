"""Plain data passes and comes back by `weights_only`; everything else is refused by name."""

import enum
import io
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch

from orlop.engine import TrainEngine
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


UNUSUAL = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "expanded": lambda: torch.ones(3).expand(4, 3),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("form", UNUSUAL)
def test_f14_tensors_that_could_not_be_filled_again_are_refused_by_name_before_anything_is_written(
    tmp_path, form
):
    model = torch.nn.Linear(3, 2)
    model.register_buffer("odd", UNUSUAL[form]())
    engine = TrainEngine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(CheckpointUnsafe, match=r"model\.odd"):
        engine.save_dcp(tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


class Holder:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("form", ["sparse", "csr", "quantized", "nested"])
def test_parts_hold_dense_tensors_only(tmp_path, form):
    model = torch.nn.Linear(3, 2)
    part = Holder(UNUSUAL[form]())
    engine = TrainEngine(model, torch.optim.SGD(model.parameters(), lr=0.1), parts={"own": part})
    with pytest.raises(CheckpointUnsafe, match=r"own\['value'\]"):
        engine.save_dcp(tmp_path / "x")


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(3).expand(4, 3),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(2, dtype=torch.complex64).conj().imag,
    ],
    ids=["expanded", "conjugate", "negative"],
)
def test_parts_may_hold_views_of_every_dense_kind(tmp_path, value):
    model = torch.nn.Linear(3, 2)
    first, second = (
        TrainEngine(model, torch.optim.SGD(model.parameters(), lr=0.1), parts={"own": Holder(held)})
        for held in (value, None)
    )
    first.save_dcp(tmp_path / "x")
    second.load_dcp(tmp_path / "x")
    assert torch.equal(second.parts["own"].value, value)
