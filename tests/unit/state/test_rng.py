"""state/rng: next draws are bit-equal, saving draws nothing, a bad state changes nothing."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch

from orlop.errors import CheckpointMismatch
from orlop.state.rng import RngState


def _draw() -> tuple[object, ...]:
    return (
        [random.random() for _ in range(5)],
        random.gauss(0, 1),
        np.random.rand(5).tolist(),
        np.random.standard_normal(),
        torch.rand(5).tolist(),
        torch.randn(17).tolist(),
    )


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(type(key) is str and _is_plain(each) for key, each in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or type(value) in (int, float, str, bytes)


@pytest.fixture(autouse=True)
def _mid_stream():
    before = RngState().state_dict()
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    random.gauss(0, 1), np.random.standard_normal(), torch.rand(3)  # leaves half a gaussian pair behind
    yield
    RngState().load_state_dict(before)


def test_next_draws_are_equal() -> None:
    saved = RngState().state_dict()
    first = _draw()
    assert _draw() != first
    RngState().load_state_dict(saved)
    assert _draw() == first


def test_saving_draws_nothing() -> None:
    first = RngState().state_dict()
    assert RngState().state_dict() == first
    expected = _draw()
    RngState().load_state_dict(first)
    RngState().state_dict()
    assert _draw() == expected


def test_the_state_is_plain_data_and_not_a_view() -> None:
    saved = RngState({"sampler": torch.Generator().manual_seed(4)}).state_dict()
    kept = copy.deepcopy(saved)
    _draw()
    assert saved == kept
    assert _is_plain(saved)


def test_named_generators() -> None:
    generator = torch.Generator().manual_seed(9)
    part = RngState({"sampler": generator})
    saved = part.state_dict()
    first = torch.rand(4, generator=generator)
    part.load_state_dict(saved)
    assert torch.equal(torch.rand(4, generator=generator), first)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda s: s.pop("python"),
        lambda s: s["python"].update(internal=[1, 2, 3]),
        lambda s: s.update(torch=s["torch"][:-16]),  # torch 2.6 takes a form that is 8 bytes shorter
        lambda s: s["numpy"].update(bit_generator="PCG64"),
        lambda s: s["numpy"]["state"].update(key=[1, 2]),
        lambda s: s["generators"].update(ghost=b""),
        lambda s: s.update(numpy=None),
    ],
)
def test_a_bad_state_is_refused_and_nothing_changes(spoil) -> None:
    saved = RngState().state_dict()
    _draw()
    live = RngState().state_dict()
    spoil(saved)
    with pytest.raises(CheckpointMismatch) as caught:
        RngState().load_state_dict(saved)
    assert caught.value.where.startswith("rng")
    assert RngState().state_dict() == live


def test_a_lost_accelerator_is_told(caplog: pytest.LogCaptureFixture) -> None:
    saved = RngState().state_dict()
    saved["accelerator"] = {"type": "nosuch", "current": 0, "states": [b""]}
    RngState().load_state_dict(saved)
    assert "nosuch" in caplog.text
