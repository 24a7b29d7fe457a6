"""Replicas that differ are told of at a save with fingerprint=True: DCP keeps one rank's without a word."""

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

import orlop
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
