"""A few real SIGKILLs; `make fault-long` does hundreds."""

from __future__ import annotations

from pathlib import Path

from tests.fault.kills import Killer


def test_c01_a_killed_save_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    killer = Killer(tmp_path / "run", seed=1)
    for _ in range(6):
        killer.kill_once()
    tally = killer.tally
    assert tally.faults == []
    assert (tally.kills, tally.old + tally.new) == (6, 5)
