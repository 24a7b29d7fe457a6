"""configs: what is refused, what is built, what is logged, what is switched off."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from orlop.configs import AdamWConfig, LoadCheckpointConfig
from orlop.optim.swap import SwapAdamW


def _model() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    return model


@pytest.mark.parametrize(
    "field, value",
    [
        ("learning_rate", 1e-3),
        ("lr", -1.0),
        ("lr", float("nan")),
        ("betas", (0.9, 1.0)),
        ("betas", (0.9,)),
        ("max_grad_norm", 0.0),
        ("skip_grad_norm_threshold", -1.0),
    ],
)
def test_adamw_refuses(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field) as caught:
        AdamWConfig(**{field: value})
    assert not isinstance(caught.value, ValidationError)
    assert "pydantic" not in str(caught.value)


def test_every_wrong_field_is_named_once_with_its_value_or_the_field_that_was_meant() -> None:
    with pytest.raises(ValueError) as caught:
        AdamWConfig(lr=-1, eps="a", weigth_decay=0.1)
    assert str(caught.value) == (
        "AdamWConfig.lr: Input should be greater than or equal to 0; it is -1; "
        "AdamWConfig.eps: Input should be a valid number, unable to parse string as a number; it is 'a'; "
        "AdamWConfig has no field 'weigth_decay'; it has weight_decay"
    )
    with pytest.raises(ValueError, match=r"^LoadCheckpointConfig.checkpoint_path: .*; it is 3$"):
        LoadCheckpointConfig(checkpoint_path=3)


def test_unknown_load_fields_are_refused() -> None:
    with pytest.raises(ValueError, match="has no field 'load_lr'"):
        LoadCheckpointConfig(load_lr=True)


def test_configs_are_frozen() -> None:
    config = AdamWConfig()
    with pytest.raises(ValidationError):
        config.lr = 2.0
    assert config.lr == 1e-3


@pytest.mark.parametrize("swap, kind", [(True, SwapAdamW), (False, torch.optim.AdamW)])
def test_build(swap: bool, kind: type) -> None:
    model = _model()
    config = AdamWConfig(
        lr=5e-4, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.2, foreach=False, swap_optimizer=swap
    )
    optimizer = config.build(model)
    assert type(optimizer) is kind
    (group,) = optimizer.param_groups
    assert [id(p) for p in group["params"]] == [id(p) for p in model[1].parameters()]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"], group["foreach"]) == (
        5e-4,
        (0.8, 0.95),
        1e-6,
        0.2,
        False,
    )


def test_build_logs_what_trains_and_what_does_not(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="orlop"):
        AdamWConfig(swap_optimizer=False).build(_model())
    (record,) = caplog.records
    assert record.getMessage() == "2 parameters train (8 elements); 2 do not: 0.weight, 0.bias"


def test_many_frozen_names_are_shortened(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(9)))
    model[:8].requires_grad_(False)
    with caplog.at_level(logging.INFO, logger="orlop"):
        AdamWConfig(swap_optimizer=False).build(model)
    assert (
        caplog.records[0]
        .getMessage()
        .endswith("16 do not: 0.weight, 0.bias, 1.weight, 1.bias, 2.weight and 11 more")
    )


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to train"):
        AdamWConfig().build(_model().requires_grad_(False))


def test_what_is_switched_off() -> None:
    everything = LoadCheckpointConfig(checkpoint_path="a/b")
    assert everything.checkpoint_path == Path("a/b")
    assert everything.skip_parts == frozenset()
    assert everything.clean_starts(10) == []
    weights = LoadCheckpointConfig(
        load_optimizer_states=False, load_optimizer_args=False, load_dataset=False, load_scheduler=False
    )
    assert weights.skip_parts == {"data", "scheduler", "progress", "rng"}
    assert len(weights.clean_starts(10)) == 4
    assert any("over 10 steps" in text for text in weights.clean_starts(10))
