"""batches: how a model is called, what counts as tokens."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from orlop.batches import call_model, count_tokens_of


def _model(x, y=2.0):
    return torch.as_tensor(x) * y


@pytest.mark.parametrize("batch", [{"x": 3.0, "y": 4.0}, (3.0, 4.0), [3.0, 4.0], torch.tensor(6.0)])
def test_the_model_is_called_with_the_batch(batch) -> None:
    assert call_model(_model, batch).item() == 12.0


def test_an_objects_loss() -> None:
    assert call_model(lambda x: SimpleNamespace(loss=torch.tensor(1.5)), 0).item() == 1.5


def test_a_loss_that_is_no_tensor_is_refused() -> None:
    with pytest.raises(TypeError, match="loss_fn"):
        call_model(lambda x: SimpleNamespace(loss=1.5), 0)


@pytest.mark.parametrize(
    "batch, tokens",
    [
        ((torch.zeros(2, 5), torch.zeros(2, 7, dtype=torch.long)), 14),
        ({"input_ids": torch.zeros(3, 4, dtype=torch.int32), "x": torch.zeros(9)}, 12),
        (torch.zeros(6, 2), 6),
        ((torch.zeros(()),), 1),
        ("text", 0),
    ],
)
def test_tokens(batch, tokens: int) -> None:
    assert count_tokens_of(batch) == tokens
