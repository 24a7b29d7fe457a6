"""When a run is killed: chosen before it starts, from a seed.

Pure: who watches the run asks `is_due` with what it sees, and strikes.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One planned kill of all ranks.

    Attributes:
        moment: Right after a step, or while a checkpoint is being written.
        step: After this step; or in the first write of a checkpoint of this step or a later one.
        delay_seconds: From seeing that moment to the kill.
    """

    moment: Literal["between steps", "while writing"]
    step: int
    delay_seconds: float = 0.0

    def is_due(self, last_step: int, writing: Collection[int]) -> bool:
        """Whether the moment is there.

        Args:
            last_step: The last step that the metrics show.
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
        last_step: The last step that the metrics showed.
        published: The newest published checkpoint, from which the run goes on; 0 when there was none.
        writing: The step whose checkpoint was being written, where that was the moment.
        processes: How many were killed.
    """

    kill: Kill
    last_step: int
    published: int
    writing: int | None
    processes: int


def plan_kills(steps: int, save_every: int, seed: int) -> list[Kill]:
    """One kill between two steps in the first half, one while a checkpoint is written in the second half.

    Raises:
        ValueError: The run is too short: four saves give room for both kills and for a second try.
    """
    if save_every < 2 or steps < 4 * save_every:
        raise ValueError(
            f"{steps} steps with a save every {save_every}: need save_every >= 2, steps >= 4 x that"
        )
    draw = random.Random(seed)
    # Past the first save, so that there is something to resume; not at a save, so that it is between steps.
    early = [step for step in range(save_every + 1, steps // 2 + 1) if step % save_every]
    late = list(range(-(-steps // (2 * save_every)) * save_every, steps - save_every + 1, save_every))
    return [
        Kill(moment="between steps", step=draw.choice(early)),
        Kill(moment="while writing", step=draw.choice(late), delay_seconds=draw.uniform(0.0, 0.1)),
    ]
