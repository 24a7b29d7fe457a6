"""Replicas that differ are told of at a save with fingerprint=True: DCP keeps one rank's without a word."""

import contextlib
import logging
from pathlib import Path

import pytest
import torch
from tests.modules import Remembers
from torch import nn

import orlop
from orlop.errors import CheckpointMismatch
from orlop.testing import run_ranks

pytestmark = pytest.mark.dist


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def save(rank: int, root: Path, torn: bool, fingerprint: bool) -> list[str]:
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    if torn and rank == 1:
        model.bias.data += 1
    engine = orlop.TrainEngine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    kept = Kept()
    logging.getLogger("orlop").addHandler(kept)
    orlop.CheckpointStore(root).save(engine, 1, fingerprint=fingerprint)
    return kept.texts


def test_d04_replicas_that_differ_are_named_with_their_ranks(tmp_path: Path) -> None:
    one, two = run_ranks(save, 2, tmp_path / "torn", True, True)
    (text,) = one
    assert two == []
    assert "replica content differs: 1 leaf is" in text
    assert "model.bias (rank 0 differs from rank 1)" in text
    assert "model.weight" not in text
    assert (tmp_path / "torn" / "step-00000001" / "orlop.json").exists()


def test_d04_equal_replicas_are_no_news_and_nothing_is_compared_unasked(tmp_path: Path) -> None:
    assert run_ranks(save, 2, tmp_path / "alike", False, True) == [[], []]
    assert run_ranks(save, 2, tmp_path / "unasked", True, False) == [[], []]


def save_extra(rank: int, root: Path, as_tensor: bool) -> list[str]:
    mine, same = (torch.tensor([rank]), torch.tensor([7])) if as_tensor else ({"seen": rank}, {"seen": 7})
    model = nn.Sequential(nn.Linear(2, 2), Remembers(mine), Remembers(same))
    torch.nn.init.ones_(model[0].weight)
    torch.nn.init.ones_(model[0].bias)
    kept = Kept()
    logging.getLogger("orlop").addHandler(kept)
    orlop.TrainEngine(model, torch.optim.SGD(model[0].parameters(), lr=0.1)).save_dcp(root / "x")
    return kept.texts


@pytest.mark.parametrize("as_tensor", [True, False])
def test_d04_extra_state_that_differs_is_named_unasked(tmp_path: Path, as_tensor: bool) -> None:
    (text,), two = run_ranks(save_extra, 2, tmp_path, as_tensor)
    assert two == []
    assert "replica content differs: 1 leaf is" in text
    assert "model.1._extra_state (rank 0 differs from rank 1)" in text


def save_own_state(rank: int, root: Path, same: bool) -> str:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight]["seen"] = [7 if same else rank]
    engine = orlop.TrainEngine(model, optimizer)
    with pytest.raises(CheckpointMismatch) if not same else contextlib.nullcontext() as caught:
        engine.save_dcp(root / "x")
    return "" if same else str(caught.value)


def test_d04_plain_data_in_an_optimizers_state_is_one_for_all_or_refused(tmp_path: Path) -> None:
    one, two = run_ranks(save_own_state, 2, tmp_path, False)
    assert one == two
    assert "replica content differs" in one
    assert "optimizer.state.weight.seen" in one
    assert not list(tmp_path.iterdir())
    assert run_ranks(save_own_state, 2, tmp_path, True) == ["", ""]
