"""When a run is killed: chosen before it starts, from a seed.

Pure: who watches the run asks `is_due` with what it sees, and strikes.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

from orlop.wording import counted

__all__ = ["Kill", "Killed", "plan_kills"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One planned kill.

    Attributes:
        moment: Some time after a step was recorded, or while a checkpoint is being written.
        step: After this step; or in the first write of a checkpoint of this step or a later one.
        delay_seconds: From seeing that moment to the kill.
    """

    moment: Literal["between steps", "while writing"]
    step: int
    delay_seconds: float = 0.0

    def is_due(self, last_step: int, writing: Collection[int]) -> bool:
        """Whether the moment is there.

        Args:
            last_step: The last step that the records show.
            writing: The steps whose checkpoints are begun and not published.
        """
        if self.moment == "between steps":
            return last_step >= self.step
        return any(step >= self.step for step in writing)

    def after_a_miss(self, step: int) -> Kill:
        """The kill for the next save, without any delay, when the write of `step` was over too soon."""
        return replace(self, step=step + 1, delay_seconds=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Killed:
    """A kill that happened.

    Attributes:
        kill: As it was planned.
        last_step: The last step that the records showed.
        published: The newest published checkpoint, from which the run goes on; 0 when there was none.
        writing: The step whose checkpoint was being written, where that was the moment.
        processes: How many were killed.
    """

    kill: Kill
    last_step: int
    published: int
    writing: int | None
    processes: int


def plan_kills(
    steps: Collection[int],
    saved: Collection[int],
    *,
    count: int,
    during_save: bool,
    step_seconds: float,
    seed: int,
) -> list[Kill]:
    """Kills at random instants of a run like the one that was seen, in the order of their steps.

    Args:
        steps: The steps that the uninterrupted run recorded.
        saved: The steps whose checkpoints it published.
        count: How many kills.
        during_save: Whether every other one, the last one included, is to hit a checkpoint being written.
        step_seconds: How long a step takes; a kill between steps is delayed by up to that.
        seed: Decides; with another `step_seconds`, as the next run measures it, instants are slightly off.

    Raises:
        ValueError: The run is too short for that many.
    """
    draw = random.Random(seed)
    # The last step and the last save are left out: the run could be over before the kill strikes.
    between = sorted(steps)[:-1]
    writing = sorted(saved)[:-1]
    wants_save = [during_save and (count - number) % 2 == 1 for number in range(count)]
    num_writing = sum(wants_save)
    if len(between) < count - num_writing or len(writing) < num_writing:
        raise ValueError(
            f"{counted(len(steps), 'step')} with {counted(len(saved), 'checkpoint')} are too few for "
            + counted(count, "kill")
            + (f", {num_writing} of them while a checkpoint is written" if num_writing else "")
        )
    kills = [
        Kill(moment="while writing", step=step, delay_seconds=draw.uniform(0.0, min(0.1, step_seconds)))
        for step in draw.sample(writing, num_writing)
    ]
    kills += [
        Kill(moment="between steps", step=step, delay_seconds=draw.uniform(0.0, step_seconds))
        for step in draw.sample(between, count - num_writing)
    ]
    return sorted(kills, key=lambda kill: (kill.step, kill.moment))
