"""A crash between any two operations of a save: resume gives the old or the new checkpoint, and saving goes on.

The crashes are replayed from a record: for each prefix of the operations, the directory that a killed process and
several kinds of power cut would leave.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from tests.fault.tiny import Tiny, expected_states, same
from torch import Tensor

from orlop import CheckpointStore
from orlop.store import files
from orlop.testing import CrashLog, run_ranks

# Whether the root is new, or one where the save makes an older checkpoint expire.
FRESH, RETAINING = 1, 3


def record(directory: Path, log: Path, step: int) -> CrashLog:
    """A save of `step`, recorded; before it, a root that retains two (or none yet)."""
    tiny = Tiny()
    store = CheckpointStore(directory / "run", keep_last=2)
    for earlier in range(1, step):
        tiny.train(earlier)
        store.save(tiny.engine, earlier)
    tiny.train(step)
    crashes = CrashLog(directory, log)
    barrier()
    with files.observed(crashes.observe):
        store.save(tiny.engine, step)
    barrier()
    if tiny.engine.ranks.is_coordinator:
        crashes.finish()
    barrier()
    return crashes


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def replay(
    crashes: CrashLog, scratch: Path, step: int, kind: str | None = None, rank: int = 0
) -> dict[str, int]:
    """Resumes after every crash and saves again; returns how many crashes of which outcome there were."""
    states = expected_states(step + 1)
    outcomes = {"old": 0, "new": 0}
    for number, crash in enumerate(crashes.crashes()):
        if kind is not None and kind not in crash.kinds:
            continue
        directory = scratch / str(number)
        if rank == 0:
            crash.build(directory)
        barrier()
        where = f"after {crash.after} operations, the last to {crash.last}: {', '.join(crash.kinds)}"
        outcomes[resume_and_save(directory / "run", states, step, where, crash.returned)] += 1
    assert outcomes["old"]
    assert outcomes["new"]
    return outcomes


def resume_and_save(
    root: Path, states: dict[int, dict[str, Tensor]], step: int, where: str, must_be_new: bool
) -> str:
    tiny = Tiny()
    store = CheckpointStore(root, keep_last=2)
    resumed = store.resume(tiny.engine)
    found = 0 if resumed is None else resumed.step
    assert found in ((step,) if must_be_new else (step - 1, step)), where
    if found:
        assert same(tiny.state(), states[found]), where
    # Training goes on from there, to the same step or the next, and that can be saved.
    tiny.train(found + 1)
    store.save(tiny.engine, found + 1)
    other = Tiny()
    again = CheckpointStore(root).resume(other.engine)
    assert again is not None, where
    assert again.step == found + 1, where
    assert same(other.state(), states[found + 1]), where
    return "new" if found == step else "old"


@pytest.mark.parametrize("step", [FRESH, RETAINING])
def test_every_crash_of_one_rank_leaves_the_old_or_the_new(tmp_path: Path, step: int) -> None:
    (tmp_path / "disk").mkdir()
    crashes = record(tmp_path / "disk", tmp_path / "log", step)
    outcomes = replay(crashes, tmp_path / "replays", step)
    assert sum(outcomes.values()) > 30


def record_and_replay(rank: int, tmp_path: Path, step: int) -> dict[str, int]:
    crashes = record(tmp_path / "disk", tmp_path / "log", step)
    # All kinds are tried with one rank; here each try costs many messages.
    kind = "kill" if step == RETAINING else "power cut: names lost, below lost, data empty"
    return replay(crashes, tmp_path / "replays", step, kind, rank)


@pytest.mark.dist
@pytest.mark.parametrize("step", [FRESH, RETAINING])
def test_every_crash_of_two_ranks_leaves_the_old_or_the_new(tmp_path: Path, step: int) -> None:
    (tmp_path / "disk").mkdir()
    outcomes, others = run_ranks(record_and_replay, 2, tmp_path, step)
    assert outcomes == others
    assert sum(outcomes.values()) > 15


@pytest.mark.parametrize("forgotten", ["fsync_file", "fsync_directory"])
def test_a_save_that_forgets_to_sync_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgotten: str
) -> None:
    """The tests above can fail: names or data that were not synced are lost in some crash."""
    (tmp_path / "disk").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(files, forgotten, lambda path: None)
        patch.setattr(files.NewFile, "fsync", lambda file: None)
        crashes = record(tmp_path / "disk", tmp_path / "log", FRESH)
    lost = []
    for number, crash in enumerate(crash for crash in crashes.crashes() if crash.returned):
        crash.build(tmp_path / str(number))
        lost.append(1 not in CheckpointStore(tmp_path / str(number) / "run").steps())
    assert any(lost)


def test_a_power_cut_takes_what_was_not_synced(tmp_path: Path) -> None:
    """The model of the disk itself: a store that forgot one fsync would be caught."""
    root = tmp_path / "disk"
    root.mkdir()
    crashes = CrashLog(root, tmp_path / "log")
    with files.observed(crashes.observe):
        with files.new_file(root / "unsynced") as file:
            file.write(b"data")
        files.write_file(root / "nameless", b"data")
    crashes.finish()
    last = [crash for crash in crashes.crashes() if crash.last == "fsync nameless"]
    trees = [crash.tree for crash in last]
    assert {} in trees
    assert {"unsynced": b"", "nameless": b"data"} in trees
    assert {"unsynced": b"da", "nameless": b"data"} in trees
    assert {"unsynced": b"data", "nameless": b"data"} in trees
