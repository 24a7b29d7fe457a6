"""The rules of absence, on plain descriptions: no model, no files."""

import pytest
import torch

from orlop.dcp.boxes import Box
from orlop.state.absence import (
    Stored,
    Wanted,
    WantedState,
    check_state,
    check_tensor,
    is_lossless,
    state_index,
)
from orlop.state.matching import check_unclaimed
from orlop.state.policy import LoadPolicy

WHOLE = (Box((0,), (4,)),)
PREFIX = "optimizer.state."


def tensor(dtype=torch.float32, shape=(4,), chunks=WHOLE):
    return Stored(shape=shape, dtype=dtype, chunks=chunks)


def verdict_of(wanted, keys, values=None, policy=None):
    stored = {f"{PREFIX}{key}": value for key, value in keys.items()}
    index = state_index(stored, PREFIX)
    got = check_state(PREFIX, wanted, index, stored, values or {}, policy or LoadPolicy())
    return got.name, [(finding.verdict, finding.leaf.removeprefix(PREFIX)) for finding in got.findings]


MOMENT = WantedState(names=("w", "tied.w"), tensors={"m": Wanted(shape=(4,), dtype=torch.float32)})
COUNTED = WantedState(names=("w",), tensors=MOMENT.tensors, numbers=frozenset({"count"}))


def test_no_key_at_all_is_absence_and_silence_for_stateless_ones():
    assert verdict_of(MOMENT, {}) == (None, [("absent", "w")])
    assert verdict_of(WantedState(names=("w",), tensors={}, is_stateful=False), {}) == (None, [])


def test_present_state_is_loaded_under_the_name_that_it_was_saved_by():
    assert verdict_of(MOMENT, {"tied.w.m": tensor()}) == ("tied.w", [("loaded", "tied.w.m")])


def test_some_but_not_all_keys_are_damage():
    assert verdict_of(COUNTED, {"w.m": tensor()}) == ("w", [("partial", "w.count"), ("loaded", "w.m")])
    reset = LoadPolicy(reset_damaged=("w*",))
    assert verdict_of(COUNTED, {"w.m": tensor()}, policy=reset) == (None, [("reset", "w")])
    assert verdict_of(COUNTED, {"w.m": tensor()}, policy=LoadPolicy(reset_damaged=("v",)))[0] == "w"


def test_a_key_too_many_is_unexpected_unless_it_is_none():
    keys = {"w.m": tensor(), "w.max": Stored()}
    assert ("unexpected", "w.max") in verdict_of(MOMENT, keys)[1]
    assert ("ignored", "w.max") in verdict_of(MOMENT, keys, {f"{PREFIX}w.max": None})[1]
    assert ("ignored", "w.max") in verdict_of(MOMENT, keys, policy=LoadPolicy(allow_unexpected=True))[1]


def test_a_number_and_a_tensor_are_not_the_same_kind():
    assert ("kind", "w.m") in verdict_of(MOMENT, {"w.m": Stored()})[1]
    assert ("kind", "w.count") in verdict_of(COUNTED, {"w.m": tensor(), "w.count": tensor()})[1]
    assert ("loaded", "w.count") in verdict_of(COUNTED, {"w.m": tensor(), "w.count": Stored()})[1]


@pytest.mark.parametrize(
    "stored, verdict",
    [
        (tensor(), "loaded"),
        (tensor(dtype=torch.bfloat16), "widened"),
        (tensor(dtype=torch.float64), "dtype"),
        (tensor(dtype=torch.int32), "dtype"),
        (tensor(shape=(2, 2)), "shape"),
        (tensor(chunks=(Box((0,), (3,)),)), "uncovered"),
        (tensor(chunks=(Box((0,), (2,)), Box((2,), (2,)))), "loaded"),
        (tensor(chunks=(Box((2,), (4,)),)), "uncovered"),
        (tensor(chunks=()), "uncovered"),
        (Stored(), "kind"),
    ],
)
def test_each_leaf_is_checked_by_kind_shape_coverage_and_dtype(stored, verdict):
    wanted = Wanted(shape=(4,), dtype=torch.float32)
    assert check_tensor("leaf", wanted, stored, LoadPolicy()).verdict == verdict


def test_a_lossy_dtype_is_cast_only_when_allowed():
    wanted = Wanted(shape=(4,), dtype=torch.float32)
    allowed = LoadPolicy(cast_dtypes=True)
    assert check_tensor("leaf", wanted, tensor(dtype=torch.float64), allowed).verdict == "cast"


@pytest.mark.parametrize(
    "saved, live, lossless",
    [
        (torch.bfloat16, torch.float32, True),
        (torch.float16, torch.float32, True),
        (torch.float32, torch.bfloat16, False),
        (torch.float16, torch.bfloat16, False),
        (torch.bfloat16, torch.float16, False),
        (torch.int32, torch.int64, True),
        (torch.uint8, torch.int8, False),
        (torch.int64, torch.float64, False),
        (torch.float32, torch.complex64, True),
        (torch.float64, torch.complex64, False),
        (torch.complex64, torch.float64, False),
        (torch.bool, torch.uint8, True),
        (torch.bool, torch.float32, True),
        (torch.uint8, torch.bool, False),
        (torch.uint16, torch.int32, True),
        (torch.int16, torch.uint32, False),
        (torch.int16, torch.float32, True),
        (torch.int16, torch.float16, False),
        (torch.uint8, torch.bfloat16, True),
        (torch.int32, torch.float32, False),
        (torch.int32, torch.float64, True),
        (torch.float32, torch.int64, False),
        (torch.float8_e4m3fn, torch.bfloat16, True),
        (torch.float8_e5m2, torch.float16, True),
        (torch.float8_e5m2, torch.float8_e4m3fn, False),
        (torch.float8_e4m3fn, torch.float8_e5m2, False),
    ],
)
def test_widening_is_what_loses_no_value(saved, live, lossless):
    assert is_lossless(saved, live) is lossless


def test_names_that_nobody_takes_are_unexpected_and_all_of_them_is_another_layout():
    def check(names, total, policy=None):
        return check_unclaimed(PREFIX, names, total, ["w"], policy or LoadPolicy())

    assert [f.verdict for f in check({"x"}, 2)] == ["unexpected"]
    assert [f.verdict for f in check({"x"}, 2, LoadPolicy(allow_unexpected=True))] == ["ignored"]
    (layout,) = check({"0", "1"}, 2)
    assert layout.verdict == "layout"
    assert "here ['w'], in the checkpoint ['0', '1']" in layout.detail


@pytest.mark.parametrize("saved", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("live", [torch.float16, torch.bfloat16, torch.float32])
def test_eight_bit_floats_keep_every_value(saved, live):
    every = torch.arange(256, dtype=torch.uint8).view(saved)
    back = every.to(live).to(saved)
    assert torch.equal(every.to(torch.float64).nan_to_num(9e9), back.to(torch.float64).nan_to_num(9e9))
    assert is_lossless(saved, live)


def test_dtypes_without_limits_are_equal_or_not():
    assert is_lossless(torch.quint8, torch.quint8)
    assert not is_lossless(torch.float32, torch.quint8)
    assert not is_lossless(torch.bits8, torch.int32)
