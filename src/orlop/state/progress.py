"""The progress part: the counters of a run. Must not know what moves them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from orlop.errors import CheckpointMismatch


@dataclass(slots=True, kw_only=True)
class Progress:
    """How far the run is; a part, the same on all ranks.

    Attributes:
        step: Steps done, skipped ones included.
        tokens: Tokens seen by all ranks.
        skipped: Steps that the optimizer refused.
    """

    step: int = 0
    tokens: int = 0
    skipped: int = 0

    def state_dict(self) -> dict[str, int]:
        """Returns the counters."""
        return asdict(self)

    def check_state_dict(self, state: Mapping[str, int]) -> str:
        """Why these can't be taken over; empty where they can."""
        expected = {field.name for field in fields(self)}
        return "" if set(state) == expected else f"expected {sorted(expected)}, found {sorted(state)}"

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Takes the counters over.

        Raises:
            CheckpointMismatch: A counter is missing or unknown; nothing has changed.
        """
        if misfit := self.check_state_dict(state):
            raise CheckpointMismatch("The saved progress has other counters", where="progress", found=misfit)
        for field in fields(self):
            setattr(self, field.name, int(state[field.name]))
