"""state/progress: counters come back; other counters are refused whole."""

from __future__ import annotations

import pytest

from orlop.errors import CheckpointMismatch
from orlop.state.progress import Progress


def test_round_trip() -> None:
    progress = Progress()
    progress.load_state_dict(Progress(step=7, tokens=560, skipped=2).state_dict())
    assert progress == Progress(step=7, tokens=560, skipped=2)


@pytest.mark.parametrize(
    "bad", [{}, {"step": 1, "tokens": 2}, {"step": 1, "tokens": 2, "skipped": 0, "ghost": 1}]
)
def test_other_counters_are_refused(bad: dict) -> None:
    progress = Progress(step=7)
    with pytest.raises(CheckpointMismatch) as caught:
        progress.load_state_dict(bad)
    assert caught.value.where == "progress"
    assert progress == Progress(step=7)
