"""What a run is configured with: plain, validated, frozen values; unknown fields are refused.

Owns the fields, their ranges, and which optimizer they build. Must not know of engines, checkpoints'
content or ranks' talk.
"""

from __future__ import annotations

import logging
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from torch import nn

from orlop.optim.swap import SwapAdamW
from orlop.phases import is_rank_zero
from orlop.store.objects import locate
from orlop.wording import counted

_log = logging.getLogger("orlop")
_NAMES_IN_A_LOG_LINE = 5

_Beta = Annotated[float, Field(ge=0, lt=1)]


class _Config(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ValueError("; ".join(_mistakes(type(self), error))) from None


class AdamWConfig(_Config):
    """AdamW over a model's trainable parameters.

    `max_grad_norm` and `skip_grad_norm_threshold` are the step's, not the optimizer's: hand them to
    `TrainEngine`.

    Attributes:
        lr: Learning rate.
        betas: Decay of the first and second moment.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay.
        foreach: torch's implementation flag; None lets torch choose.
        max_grad_norm: Gradients are clipped to this total norm; None clips nothing.
        skip_grad_norm_threshold: A step whose total norm is higher is skipped; None skips only what isn't
            finite.
        swap_optimizer: True keeps the state in host memory (`SwapAdamW`); False builds `torch.optim.AdamW`.
    """

    lr: float = Field(default=1e-3, ge=0)
    betas: tuple[_Beta, _Beta] = (0.9, 0.999)
    eps: float = Field(default=1e-8, ge=0)
    weight_decay: float = Field(default=1e-2, ge=0)
    foreach: bool | None = None
    max_grad_norm: float | None = Field(default=None, gt=0)
    skip_grad_norm_threshold: float | None = Field(default=None, gt=0)
    swap_optimizer: bool = True

    def build(self, model: nn.Module) -> torch.optim.AdamW:
        """Builds the optimizer, one group, and logs on rank 0 how many parameters train and which do not.

        Args:
            model: Its parameters with `requires_grad` are trained; tied ones once.

        Raises:
            ValueError: No parameter of the model trains.
        """
        named = list(model.named_parameters())
        trained = [parameter for _, parameter in named if parameter.requires_grad]
        frozen = [name for name, parameter in named if not parameter.requires_grad]
        if not trained:
            raise ValueError(f"no parameter of {type(model).__name__} has requires_grad: nothing to train")
        if is_rank_zero():
            _log.info(
                "%d parameters train (%d elements); %d do not%s",
                len(trained),
                sum(parameter.numel() for parameter in trained),
                len(frozen),
                f": {_shortened(frozen)}" if frozen else "",
            )
        kind = SwapAdamW if self.swap_optimizer else torch.optim.AdamW
        return kind(
            trained,
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            foreach=self.foreach,
        )


class LoadCheckpointConfig(_Config):
    """Where a run without a checkpoint of its own starts from, and what it takes from there.

    What is switched off starts cleanly. The step counter and the random streams belong to the schedule: with
    `load_scheduler` the run goes on at the saved step; without it the run starts at step 0, its scheduler
    at its first step over all of `total_steps`.

    Attributes:
        checkpoint_path: A checkpoint's directory, or its address in an object store (`s3://...`); None starts from
            nothing.
        load_optimizer_states: False gives every parameter a fresh optimizer's state.
        load_optimizer_args: False keeps the live hyperparameters (lr, betas, ...) of every group.
        load_dataset: False starts the data from the beginning.
        load_scheduler: False starts the scheduler, its learning rates and the count of steps from the
            beginning.
    """

    checkpoint_path: Path | str | None = None
    load_optimizer_states: bool = True
    load_optimizer_args: bool = True
    load_dataset: bool = True
    load_scheduler: bool = True

    @field_validator("checkpoint_path", mode="before")
    @classmethod
    def _locate(cls, value: object) -> object:
        if not isinstance(value, (str, Path)):
            return value
        location = locate(value)
        return location if isinstance(location, Path) else str(location)

    @property
    def skip_parts(self) -> frozenset[str]:
        """The parts that are neither expected in the checkpoint nor loaded from it."""
        skipped: set[str] = set()
        if not self.load_dataset:
            skipped |= {"data"}
        if not self.load_scheduler:
            skipped |= {"scheduler", "progress", "rng"}
        return frozenset(skipped)

    def clean_starts(self, total_steps: int) -> list[str]:
        """What starts cleanly although a checkpoint is loaded, for the log."""
        switched_off = {
            "every parameter has a fresh optimizer's state": not self.load_optimizer_states,
            "hyperparameters are this run's": not self.load_optimizer_args,
            "the data starts from the beginning": not self.load_dataset,
            f"the scheduler starts at its first step, over {counted(total_steps, 'step')}": not self.load_scheduler,
        }
        return [text for text, applies in switched_off.items() if applies]


def _mistakes(config: type[BaseModel], error: ValidationError) -> list[str]:
    """One line for each field that is wrong."""
    told: dict[object, str] = {}
    for each in error.errors(include_url=False):
        name = each["loc"][0]
        text = f"{config.__name__}.{name}: {each['msg']}; it is {each['input']!r}"
        if each["type"] == "extra_forbidden":
            near = get_close_matches(str(name), config.model_fields, 1) or list(config.model_fields)
            text = f"{config.__name__} has no field {name!r}; it has {', '.join(near)}"
        told.setdefault(name, text)
    return list(told.values())


def _shortened(names: list[str]) -> str:
    rest = len(names) - _NAMES_IN_A_LOG_LINE
    return ", ".join(names[:_NAMES_IN_A_LOG_LINE]) + (f" and {rest} more" if rest > 0 else "")
