"""display: it shows nothing off a terminal, and never draws from the run's random streams."""

from __future__ import annotations

import subprocess
import sys

import pytest

from orlop.display import progress_bar
from orlop.store.metrics import StepRecord


def test_showing_draws_nothing() -> None:
    # In a process of its own: rich draws when it is imported, and that happens once.
    code = """
import random
from orlop.display import progress_bar
random.seed(0)
before = random.getstate()
with progress_bar(True, 5):
    import rich.style
    assert random.getstate() == before
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_nothing_is_shown_off_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    with progress_bar(True, 2) as show:
        show(StepRecord(step=1, loss=0.5, grad_norm=1.0, lr=[0.1], tokens=8, seconds=0.1, skipped=False))
    assert capfd.readouterr() == ("", "")
