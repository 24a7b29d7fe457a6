"""Every operation of a save fails in turn: nothing half is published, nothing old is lost, the next save works."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tests.fault.tiny import Tiny, expected_states, same

from orlop import CheckpointStore
from orlop.errors import OrlopError
from orlop.store import publish
from orlop.testing import FaultyFiles, run_ranks

STATES = expected_states(3)
REASONS = {"ENOSPC": "No space left on device", "EIO": "Input/output error"}


def prepared(root: Path) -> Path:
    """A root with steps 1 and 2, where the next save makes step 1 expire."""
    tiny = Tiny()
    for step in (1, 2):
        CheckpointStore(root).save(tiny.train(step).engine, step)
    return root


def require_resumes(root: Path, steps: tuple[int, ...], where: str) -> int:
    tiny = Tiny()
    resumed = CheckpointStore(root).resume(tiny.engine)
    assert resumed is not None, where
    assert resumed.step in steps, where
    assert same(tiny.state(), STATES[resumed.step]), where
    return resumed.step


def save_with_fault(root: Path, tiny: Tiny, where: str, reason: str, **options: Any) -> FaultyFiles:
    """One save of step 3 under a fault, and what must be true after it."""
    store = CheckpointStore(root, keep_last=2)
    failure = None
    with FaultyFiles(**options) as disk:
        try:
            store.save(tiny.engine, 3)
        except OrlopError as error:
            failure = str(error)
    published = failure is None
    assert published or reason in str(failure), where
    if not options.get("lasting"):
        # A save that raised has published nothing, one that returned has.
        assert (3 in store.steps()) == published, where
    found = require_resumes(root, (3,) if published else (2, 3), where)
    assert same(tiny.state(), STATES[3]), where
    if found == 2:
        store.save(tiny.engine, 3)
        require_resumes(root, (3,), where)
    store.save(tiny.engine, 4)
    # What a failed clean-up left is gone after the next save, and retention has caught up.
    assert sorted(path.name for path in root.iterdir()) == ["step-00000003", "step-00000004"], where
    return disk


@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize("fault", ["ENOSPC", "EIO"])
def test_every_failing_operation_leaves_the_old_or_the_new(tmp_path: Path, fault: str, lasting: bool) -> None:
    template, tiny = prepared(tmp_path / "template"), Tiny().train(3)
    for number in range(200):
        root = tmp_path / str(number)
        shutil.copytree(template, root)
        where = f"operation {number}"
        disk = save_with_fault(
            root, tiny, where, REASONS[fault], fail_at=number, fault=fault, lasting=lasting
        )
        if not disk.struck:
            break
    assert number == len(disk.operations) > 10


@pytest.mark.parametrize("fault", ["EINTR", "short write"])
def test_interruptions_and_short_writes_are_survived(tmp_path: Path, fault: Any) -> None:
    template, tiny = prepared(tmp_path / "template"), Tiny().train(3)
    struck = 0
    for number in range(200):
        root = tmp_path / str(number)
        shutil.copytree(template, root)
        with FaultyFiles(fail_at=number, fault=fault) as disk:
            CheckpointStore(root).save(tiny.engine, 3)
        require_resumes(root, (3,), f"operation {number}")
        struck += len(disk.struck)
        if number >= len(disk.operations):
            break
    assert struck >= (1 if fault == "short write" else 10)


def test_a_save_of_single_bytes_ends(tmp_path: Path) -> None:
    with FaultyFiles(fail_at=0, fault="short write", lasting=True):
        CheckpointStore(tmp_path).save(Tiny().train(3).engine, 3)
    require_resumes(tmp_path, (3,), "")


def test_a_resume_needs_no_operation_to_succeed(tmp_path: Path) -> None:
    root = prepared(tmp_path / "run")
    with FaultyFiles(fail_at=0, fault="EIO", lasting=True) as disk:
        require_resumes(root, (2,), "")
    assert disk.struck
    assert sorted(path.name for path in root.iterdir()) == ["step-00000001", "step-00000002"]


# -- C13: one rank's fault is every rank's ------------------------------------------------------------------


def fail_in_turn(rank: int, root: Path, faulty: int) -> tuple[list[str], int]:
    """Step after step is saved; in each save another operation of rank `faulty` fails."""
    tiny = Tiny().train(3)
    messages = []
    for number in range(100):
        store = CheckpointStore(root / str(number))
        with FaultyFiles(fail_at=number if rank == faulty else None, fault="ENOSPC") as disk:
            try:
                store.save(tiny.engine, 3)
                outcome = "saved"
            except OrlopError as error:
                outcome = str(error)
        messages.append(outcome)
        assert (store.steps() == [3]) == (outcome == "saved")
        dist.barrier()
        if outcome != "saved":
            if rank == 0:
                left = [path.name for path in (root / str(number)).glob("*")]
                assert not left, f"operation {number}: {left}"
            store.save(tiny.engine, 3)
        require_resumes(root / str(number), (3,), f"operation {number}")
        if not any(tiny.engine.ranks.gather(bool(disk.struck))):
            return messages, number
    raise AssertionError("it never came to an end")


@pytest.mark.dist
@pytest.mark.parametrize("faulty", [0, 1])
def test_c13_a_failing_operation_of_one_rank_fails_the_save_of_all(tmp_path: Path, faulty: int) -> None:
    (messages, operations), (others, _) = run_ranks(fail_in_turn, 2, tmp_path, faulty)
    assert messages == others
    failures = [message for message in messages if message != "saved"]
    # All of its operations fail the save but, on the coordinator, those of sweeping up.
    assert len(failures) >= max(4, operations - 2)
    for message in failures:
        assert f"rank {faulty}" in message
        assert "No space left on device" in message


# -- C11: the order -----------------------------------------------------------------------------------------


def test_c11_data_is_synced_before_the_rename_and_the_rename_before_anything_expires(tmp_path: Path) -> None:
    root = prepared(tmp_path / "run")
    with FaultyFiles() as disk:
        CheckpointStore(root, keep_last=2).save(Tiny().train(3).engine, 3)
    log = [(operation.kind, operation.path.name) for operation in disk.operations]
    targets = [operation.target for operation in disk.operations]
    published = targets.index(root / "step-00000003")
    partial = log[published][1]
    names = sorted(path.name for path in (root / "step-00000003").iterdir())
    assert {".metadata", "__0_0.distcp", "orlop.json"} <= set(names)
    before, after = log[:published], log[published + 1 :]
    for name in names:
        written = [index for index, each in enumerate(before) if each == ("write", name)]
        synced = [index for index, each in enumerate(before) if each == ("fsync", name)]
        assert max(written, default=-1) < max(synced)
    # The names last, then the rename, its directory, and only now what has expired.
    assert before[-1] == ("fsync", partial)
    assert after[:2] == [("fsync", "run"), ("rename", "step-00000001")]
    assert {kind for kind, _ in after} == {"fsync", "rename", "remove"}


def test_a_publish_that_cannot_be_made_durable_frees_the_name(tmp_path: Path) -> None:
    partial = publish.begin_partial(tmp_path / "step-1")
    (partial / ".metadata").write_bytes(b"meta")
    with FaultyFiles(fail_at=3, fault="EIO") as disk, pytest.raises(OSError, match="Input/output"):
        publish.publish(partial, tmp_path / "step-1")
    assert [operation.kind for operation in disk.operations] == [
        *("fsync", "fsync", "rename", "fsync", "rename")
    ]
    assert [path.name for path in tmp_path.iterdir()] == [partial.name]
