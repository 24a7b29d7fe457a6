import pickle
import struct
import time
import tracemalloc

import pytest

from orlop.dcp.pickled import Data, Global, read_pickle
from orlop.errors import CheckpointCorrupt, CheckpointUnsafe


class Thing:
    def __init__(self, number):
        self.number = number


VALUE = {
    "ints": [0, 1, 255, 256, 65535, 65536, -1, 2**31, -(2**40), 10**30],
    "text": ["", "ü", "x" * 300],
    "bytes": [b"", b"y" * 300],
    "others": (None, True, False, 1.5, (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)),
    "set": {1, "a"},
    ("a", 1): {2: 3},
}


@pytest.mark.parametrize("protocol", [4, 5])
def test_plain_data_comes_back(protocol):
    assert read_pickle(pickle.dumps(VALUE, protocol), frozenset(), "x") == VALUE


def test_objects_are_told_of_and_not_built():
    name = f"{Thing.__module__}.Thing"
    for protocol in (2, 4):
        thing = read_pickle(pickle.dumps(Thing(3), protocol), {name}, "x")
        assert isinstance(thing, Data)
        assert (thing.name, thing.args, thing.state) == (name, (), {"number": 3})
    assert isinstance(read_pickle(pickle.dumps(Thing), {name}, "x"), Global)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_a_global_outside_the_allow_list_is_named_and_nothing_runs(protocol, tmp_path):
    marker = tmp_path / "ran"

    class Evil:
        def __reduce__(self):
            return (open, (str(marker), "w"))

    with pytest.raises((CheckpointUnsafe, CheckpointCorrupt)) as caught:
        read_pickle(pickle.dumps(Evil(), protocol), {"torch.Size"}, "some/file")
    assert not marker.exists()
    if protocol >= 2:
        assert caught.type is CheckpointUnsafe
        assert caught.value.found.endswith("io.open")
        assert caught.value.where == "some/file"


def nested(depth):
    return b"\x80\x04" + b")" + b"\x85" * depth


@pytest.mark.parametrize(
    "name, data",
    [
        ("huge memo index", b"\x80\x04Nr\xff\xff\xff\x7f."),  # fine, and cheap
        ("deep tuple as a key", b"\x80\x04}" + nested(100_000)[2:] + b"Ns."),
        ("deep tuple in a set", b"\x80\x04\x8f(" + nested(100_000)[2:] + b"\x90."),
        ("list as a key", b"\x80\x04}]Ns."),
        ("huge string", b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60) + b"."),
        ("huge bytes", b"\x80\x04\x8e" + struct.pack("<Q", 1 << 60) + b"."),
        ("memo that was never set", b"\x80\x04h\x05."),
        ("key without value", b"\x80\x04}(Nu."),
        ("call of a string", b"\x80\x04\x8c\x01a)R."),
        ("state for a string", b"\x80\x04\x8c\x01aNb."),
        ("mark taken for an object", b"\x80\x04(\x85."),
        ("two objects left", b"\x80\x04NN."),
        ("persistent id by line", b"\x80\x04Pid\n."),
        ("extension code", b"\x80\x04\x82\x01."),
        ("unknown opcode", b"\x80\x04\xff."),
        ("endless line", b"\x80\x04c" + b"a" * 5000),
        ("empty", b""),
    ],
)
def test_hostile_bytes_cost_nothing_and_end_in_a_typed_error(name, data):
    tracemalloc.start()
    begin = time.perf_counter()
    try:
        assert read_pickle(data, frozenset(), "x") is None
        assert name == "huge memo index"
    except (CheckpointCorrupt, CheckpointUnsafe):
        assert name != "huge memo index"
    seconds, peak = time.perf_counter() - begin, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert seconds < 5
    assert peak < 100_000 + 400 * len(data)


def test_a_deep_tuple_that_is_no_key_is_only_data():
    value = read_pickle(nested(50_000) + b".", frozenset(), "x")
    assert isinstance(value, tuple)


def test_truncated_at_every_length_is_corrupt():
    content = pickle.dumps(VALUE, 4)
    for length in range(len(content)):
        with pytest.raises(CheckpointCorrupt):
            read_pickle(content[:length], frozenset(), "x")
