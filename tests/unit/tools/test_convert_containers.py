"""`convert --to torch` and `--to dcp`: containers, key types and every bit come through."""

import math
import struct
from collections import OrderedDict

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import orlop
from orlop.errors import CheckpointUnsafe
from orlop.tools.convert import convert


def same(one, two):
    """Equal in type, order and every bit."""
    if type(one) is not type(two):
        return False
    if isinstance(one, torch.Tensor):
        return (one.dtype, one.shape) == (two.dtype, two.shape) and torch.equal(as_bytes(one), as_bytes(two))
    if isinstance(one, dict):
        return list(map(typed, one)) == list(map(typed, two)) and all(same(one[key], two[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, float):
        return struct.pack("<d", one) == struct.pack("<d", two)
    return one == two


def typed(key):
    return type(key), key


def as_bytes(tensor):
    return torch.tensor(list(bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())))


def saved(path, state):
    dcp.save(state, checkpoint_id=path)
    return path


def through_torch(source, out):
    convert(source, out, to="torch")
    return torch.load(out, weights_only=True)


def through_dcp(source, out):
    convert(source, out, to="dcp")
    return through_torch(out, out.with_name("rewritten.pt"))


WAYS = {"torch": through_torch, "dcp": through_dcp}
STATES = {
    "plain data": {
        "none": None,
        "true": True,
        "int": 2**70,
        "nan": math.nan,
        "zero": -0.0,
        "complex": 1 - 2j,
        "text": "ü\n",
        "bytes": b"\0\xff",
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
    },
    "tuples and lists": {
        "t": (1, [2, (3,)]),
        "l": [1, (2, [3])],
        "deep": [[[torch.ones(2)]], (torch.ones(1), 1)],
    },
    "text keys that look like numbers": {"m": {"0": torch.ones(1), "1": torch.zeros(2)}},
    "keys of any type inside a tuple": {
        "t": ({1: "a", "1": "b", None: 2, (1, 2): 3, 1.5: 4, False: 5},),
        "x": torch.ones(1),
    },
    "an ordered dict inside a tuple": {"t": (OrderedDict(b=1, a=2),), "x": torch.ones(1)},
    "empty lists and tuples": {"l": [], "t": (), "x": torch.ones(0, 3), "s": ""},
    "dots in names": {"a.b": torch.ones(1), "a": {"c": torch.ones(2)}},
    "an optimizer's own state dict": {
        "opt": {
            "state": {
                0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(2)},
                2: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(1)},
            },
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1, 2]}],
        }
    },
    "views and strides": {
        "t": torch.arange(12.0).view(3, 4).t(),
        "e": torch.ones(1).expand(3),
        "n": torch.arange(9)[2:5],
    },
}


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("way", WAYS)
def test_what_was_saved_comes_out(tmp_path, name, way):
    source = saved(tmp_path / "x", STATES[name])
    assert same(WAYS[way](source, tmp_path / "out"), STATES[name])
    if way == "dcp":
        assert orlop.diff(source, tmp_path / "out", exact=True) == []
        assert [found for found in orlop.verify(tmp_path / "out") if found.is_fault] == []


@pytest.mark.parametrize("way", WAYS)
def test_a_torch_optimizer_loads_its_state_dict_back(tmp_path, way):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    source = saved(tmp_path / "x", {"optimizer": optimizer.state_dict()})
    loaded = WAYS[way](source, tmp_path / "out")["optimizer"]
    assert same(loaded, optimizer.state_dict())
    other = torch.optim.AdamW(nn.Linear(3, 2).parameters())
    other.load_state_dict(loaded)
    assert same(other.state_dict(), optimizer.state_dict())


def test_what_dcp_itself_does_not_keep(tmp_path):
    """Keys of dicts become text, ordered dicts become dicts, empty dicts vanish: when plain DCP saves, not here."""
    state = {"m": {3: torch.ones(1)}, "o": OrderedDict(a=torch.ones(2)), "e": {}}
    loaded = through_torch(saved(tmp_path / "x", state), tmp_path / "out")
    assert same(loaded, {"m": {"3": torch.ones(1)}, "o": {"a": torch.ones(2)}})


@pytest.mark.parametrize("value", [np.float32(1.5), np.arange(3)])
@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_numpy_is_more_than_plain_data_and_named(tmp_path, value, to):
    source = saved(tmp_path / "x", {"model": {"w": torch.ones(1)}, "part": {"n": value}})
    with pytest.raises(CheckpointUnsafe, match=r"part\.n") as caught:
        convert(source, tmp_path / "out", to=to)
    assert "numpy" in caught.value.found
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert convert(source, tmp_path / "out", to=to, only=["model"]).num_leaves == 1


DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
)
tensors = st.builds(
    lambda dtype, shape, seed: torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)).to(
        dtype
    ),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 99),
)
# No empty bytes, which torch's own `weights_only` does not load; below no empty dicts, on which its converter fails.
plain = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=4)
    | st.binary(min_size=1, max_size=4)
)
values = st.recursive(
    tensors | plain | st.tuples(plain, plain),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "b", "0", "1", "ü", "x y"]), inner, min_size=1, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(value=values)
def test_any_nesting_comes_out_as_torchs_own_converter_gives_it(tmp_path_factory, value):
    folder = tmp_path_factory.mktemp("any")
    source = saved(folder / "x", {"value": value, "x": torch.ones(1)})
    dcp_to_torch_save(source, folder / "torchs.pt")
    expected = torch.load(folder / "torchs.pt", weights_only=True)
    assert same(through_torch(source, folder / "ours.pt"), expected)
    assert same(through_dcp(source, folder / "ours"), expected)
