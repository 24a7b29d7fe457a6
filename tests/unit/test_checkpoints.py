"""CheckpointStore: which checkpoint a resume takes, what a save leaves; saving and loading are fakes."""

import contextlib
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orlop import checkpoints
from orlop.checkpoints import CheckpointStore
from orlop.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointExists,
    CheckpointIncomplete,
    CheckpointMismatch,
    CheckpointNotFound,
    StateNotReady,
)
from orlop.resume import LoadPolicy
from orlop.store import files, publish
from orlop.store.catalog import unpublished_name
from orlop.store.manifest import Manifest, write_manifest


class OneRank:
    """World size 1; `heard` is what this rank is told where it is not the coordinator."""

    def __init__(self, heard: Any = None, is_coordinator: bool = True) -> None:
        self.is_coordinator = is_coordinator
        self.heard = heard

    def require_alike(self, what: str, asked: dict[str, object]) -> None:
        pass

    def asked(self, what: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def on_coordinator(self, what: str, act: Callable[[], Any]) -> Any:
        return act() if self.is_coordinator else self.heard


def engine(failures: dict[str, Exception] | None = None, ready: bool = True, **ranks: Any) -> Any:
    """`failures`: what loading the checkpoint of that name raises; `ready`: whether it does so before touching."""

    def require_ready() -> None:
        if not ready:
            raise StateNotReady("half old, half new")

    return SimpleNamespace(ranks=OneRank(**ranks), failures=failures or {}, require_ready=require_ready)


@pytest.fixture(autouse=True)
def loads(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Fakes of both stories: the save writes a tiny checkpoint, the resume notes its call."""
    calls: list[dict[str, Any]] = []

    def fake_save(engine: Any, path: Path, *, step: int, fingerprint: bool) -> None:
        partial = publish.begin_partial(path)
        (partial / "__0_0.distcp").write_bytes(b"data!")
        (partial / ".metadata").write_bytes(b"meta")
        sizes = files.file_sizes(partial)
        write_manifest(partial, Manifest(step=step, torch_version="2", world_size=1, files=sizes))
        publish.publish(partial, path)

    def fake_resume(engine: Any, path: Path, **options: Any) -> str:
        calls.append({"path": path, **options})
        error = engine.failures.get(path.name)
        if error is not None:
            raise error
        return "report"

    monkeypatch.setattr(checkpoints, "save_checkpoint", fake_save)
    monkeypatch.setattr(checkpoints, "resume_checkpoint", fake_resume)
    return calls


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def content(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def incomplete(root: Path, step: int) -> Path:
    path = root / f"step-{step:08d}"
    path.mkdir()
    (path / "__0_0.distcp").write_bytes(b"half")
    return path


def test_save_then_resume_takes_the_newest(tmp_path: Path, loads: list[dict[str, Any]]) -> None:
    store = CheckpointStore(tmp_path / "run")
    assert store.steps() == []
    assert store.save(engine(), 10) == tmp_path / "run" / "step-00000010" == store.path(10)
    store.save(engine(), 20)
    assert store.steps() == [10, 20]
    resumed = store.resume(engine(), load_args=False)
    assert resumed is not None
    assert (resumed.step, resumed.path, resumed.report) == (20, store.path(20), "report")
    assert loads[0]["path"] == store.path(20)
    assert (loads[0]["load_states"], loads[0]["load_args"]) == (True, False)
    resumed = store.resume(engine(), step=10)
    assert resumed is not None
    assert resumed.step == 10


def test_going_back_says_which_newer_checkpoints_are_in_the_way(
    tmp_path: Path, loads: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    store = three(tmp_path, keep_last=None)
    newest, *older = sorted(store.steps(), reverse=True)
    before = content(tmp_path)
    store.resume(engine(), step=newest)
    assert not caplog.records
    store.resume(engine(), step=older[-1])
    (record,) = caplog.records
    assert f"went back to step {older[-1]}" in record.getMessage()
    assert f"({older[0]}, {newest})" in record.getMessage()
    assert content(tmp_path) == before


@pytest.mark.parametrize("arguments", [{"keep_last": 0}, {"keep_every": 0}])
def test_a_retention_of_nothing_is_refused(tmp_path: Path, arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        CheckpointStore(tmp_path, **arguments)


# -- C05, C08: what a resume takes ----------------------------------------------------------------------


def break_metadata(path: Path) -> None:
    (path / ".metadata").unlink()


def break_shard(path: Path) -> None:
    (path / "__0_0.distcp").unlink()


def break_shard_size(path: Path) -> None:
    (path / "__0_0.distcp").write_bytes(b"")


def break_all(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()


def break_to_temporary(path: Path) -> None:
    break_all(path)
    (path / ".metadata.tmp").write_bytes(b"meta")


def break_manifest(path: Path) -> None:
    (path / "orlop.json").write_bytes(b"")


@pytest.mark.parametrize(
    "damage, why",
    [
        (break_metadata, ".metadata is missing"),
        (break_shard, "__0_0.distcp is missing"),
        (break_shard_size, "__0_0.distcp has 0 bytes instead of 5"),
        (break_all, "it is empty"),
        (break_to_temporary, "temporary files"),
        (break_manifest, "Expecting value"),
    ],
)
def test_c05_an_incomplete_checkpoint_is_passed_over_with_one_warning_that_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, loads: list[dict[str, Any]], damage: Any, why: str
) -> None:
    store = CheckpointStore(tmp_path)
    store.save(engine(), 10)
    damage(store.save(engine(), 20))
    before = content(tmp_path)
    with caplog.at_level(logging.WARNING):
        resumed = store.resume(engine())
    assert resumed is not None
    assert resumed.step == 10
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "step-00000020" in caplog.text
    assert why in caplog.text
    assert store.steps() == [10]

    with pytest.raises(CheckpointError) as caught:
        store.resume(engine(), step=20)
    if damage is not break_manifest:
        assert type(caught.value) is CheckpointIncomplete
    assert "step-00000020" in str(caught.value.where)
    assert why in str(caught.value.found)
    assert [call["path"] for call in loads] == [store.path(10)]
    assert content(tmp_path) == before


def test_c05_every_passed_over_directory_has_its_own_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        incomplete(tmp_path, step)
    with caplog.at_level(logging.INFO):
        assert store.resume(engine()) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3
    assert "fresh start" in caplog.records[-1].getMessage()
    assert "though 2 that are not" in caplog.records[-1].getMessage()


def test_c08_an_empty_or_missing_run_is_a_logged_fresh_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for root in (tmp_path, tmp_path / "nowhere"):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            assert CheckpointStore(root).resume(engine()) is None
        assert [record.levelname for record in caplog.records] == ["INFO"]
        assert "fresh start" in caplog.text
        assert str(root) in caplog.text
    assert not (tmp_path / "nowhere").exists()


def test_c08_a_step_that_is_not_there_is_never_ignored(tmp_path: Path, loads: list[dict[str, Any]]) -> None:
    for store in (CheckpointStore(tmp_path / "nowhere"), CheckpointStore(tmp_path)):
        with pytest.raises(CheckpointNotFound) as caught:
            store.resume(engine(), step=20)
        assert isinstance(caught.value, FileNotFoundError)
        assert str(store.path(20)) == caught.value.where
        store.save(engine(), 10)
        with pytest.raises(CheckpointNotFound, match=r"steps \[10\]"):
            store.resume(engine(), step=20)
    assert loads == []


def test_a_plain_dcp_directory_is_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "step-30").mkdir()
    (tmp_path / "step-30" / ".metadata").write_bytes(b"meta")
    store = CheckpointStore(tmp_path)
    store.save(engine(), 20)
    resumed = store.resume(engine())
    assert resumed is not None
    assert (resumed.step, resumed.path) == (30, tmp_path / "step-30")


def test_names_that_only_look_like_checkpoints_are_not_resumed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(engine(), 10)
    for name in ("step-12x", "step-12.partial-h-1-00ff00ff", "step-12.partial-mine"):
        store.path(10).rename(tmp_path / name)
        assert store.resume(engine()) is None
        (tmp_path / name).rename(store.path(10))


def test_a_checkpoint_of_a_newer_orlop_is_not_passed_over(
    tmp_path: Path, loads: list[dict[str, Any]]
) -> None:
    store = CheckpointStore(tmp_path)
    store.save(engine(), 10)
    (store.save(engine(), 20) / "orlop.json").write_text('{"schema_version": 99}')
    with pytest.raises(CheckpointError, match="newer orlop") as caught:
        store.resume(engine())
    assert "step-00000020" in str(caught.value.where)
    assert loads == []


def test_other_ranks_take_what_the_coordinator_chose(tmp_path: Path, loads: list[dict[str, Any]]) -> None:
    # This node's listing is behind: it shows nothing. It must follow all the same.
    resumed = CheckpointStore(tmp_path).resume(
        engine(is_coordinator=False, heard=SimpleNamespace(step=10, name="step-10"))
    )
    assert resumed is not None
    assert (resumed.step, resumed.path) == (10, tmp_path / "step-10")
    assert CheckpointStore(tmp_path).resume(engine(is_coordinator=False, heard=None)) is None
    assert len(loads) == 1


CORRUPT = CheckpointCorrupt("A checksum is wrong.", where="step-00000020/__0_0.distcp: model.weight")


def three(root: Path, **options: Any) -> CheckpointStore:
    store = CheckpointStore(root, **options)
    for step in (5, 10, 20):
        store.save(engine(), step)
    return store


def test_one_that_proves_damaged_while_it_is_read_is_passed_over_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, loads: list[dict[str, Any]]
) -> None:
    store = three(tmp_path)
    before = content(tmp_path)
    missing = CheckpointIncomplete("A file is missing.", where="step-00000010")
    with caplog.at_level(logging.INFO):
        resumed = store.resume(engine({"step-00000020": CORRUPT, "step-00000010": missing}))
    assert resumed is not None
    assert resumed.step == 5
    assert [call["path"].name for call in loads] == ["step-00000020", "step-00000010", "step-00000005"]
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    first, second = (record.getMessage() for record in caplog.records)
    assert "step-00000020" in first
    assert "model.weight" in first
    assert "A file is missing" in second
    assert content(tmp_path) == before


def test_when_no_checkpoint_loads_the_newest_ones_error_is_raised_and_nothing_starts_afresh(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = three(tmp_path)
    older = CheckpointIncomplete("A file is missing.", where="an older one")
    failures = {"step-00000020": CORRUPT, "step-00000010": older, "step-00000005": older}
    with caplog.at_level(logging.INFO), pytest.raises(CheckpointCorrupt) as caught:
        store.resume(engine(failures))
    assert caught.value.where == CORRUPT.where
    assert "fresh start" not in caplog.text


def test_a_step_that_was_asked_for_and_is_damaged_raises(tmp_path: Path, loads: list[dict[str, Any]]) -> None:
    store = three(tmp_path)
    with pytest.raises(CheckpointCorrupt) as caught:
        store.resume(engine({"step-00000020": CORRUPT}), step=20)
    assert caught.value.where == CORRUPT.where
    assert [call["path"].name for call in loads] == ["step-00000020"]


def test_one_that_does_not_fit_is_never_passed_over(tmp_path: Path, loads: list[dict[str, Any]]) -> None:
    mismatch = CheckpointMismatch("Shapes differ.", where="model.weight")
    with pytest.raises(CheckpointMismatch, match=r"model\.weight"):
        three(tmp_path).resume(engine({"step-00000020": mismatch}))
    assert len(loads) == 1


@pytest.mark.parametrize("ready", [True, False])
def test_after_a_load_that_broke_off_half_way_no_live_value_is_kept(
    tmp_path: Path, loads: list[dict[str, Any]], ready: bool
) -> None:
    policy = LoadPolicy(allow_missing=True, cast_dtypes=True)
    three(tmp_path).resume(engine({"step-00000020": CORRUPT}, ready=ready), policy=policy)
    first, second = (call["policy"] for call in loads)
    assert first == policy
    assert second == LoadPolicy(allow_missing=ready, cast_dtypes=True)


def test_training_that_comes_to_a_damaged_step_again_can_save_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = three(tmp_path)
    store.resume(engine({"step-00000020": CORRUPT}))
    store.save(engine(), 20)
    assert store.steps() == [5, 10, 20]
    aside = [name for name in names(tmp_path) if name.startswith("step-00000020.damaged-")]
    assert len(aside) == 1
    assert aside[0] in caplog.text
    # What was written anew is a checkpoint like any other.
    with pytest.raises(CheckpointExists):
        store.save(engine(), 20)


def test_a_damaged_one_does_not_take_the_place_of_one_that_loads(tmp_path: Path) -> None:
    store = three(tmp_path, keep_last=2)
    assert store.steps() == [10, 20]
    store.resume(engine({"step-00000020": CORRUPT}))
    store.save(engine(), 11)
    assert store.steps() == [10, 11, 20]


def test_nothing_expires_when_what_was_just_saved_does_not_verify(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    store.save(engine(), 10)
    save = checkpoints.save_checkpoint

    def lose_a_file(engine: Any, path: Path, **options: Any) -> None:
        save(engine, path, **options)
        (path / "__0_0.distcp").unlink()

    monkeypatch.setattr(checkpoints, "save_checkpoint", lose_a_file)
    store.save(engine(), 20)
    assert store.steps() == [10]
    assert "does not verify" in caplog.text


# -- what is being read stays ----------------------------------------------------------------------------


def test_a_checkpoint_that_is_being_read_expires_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    store.save(engine(), 10)
    resume = checkpoints.resume_checkpoint

    def save_meanwhile(engine_: Any, path: Path, **options: Any) -> Any:
        CheckpointStore(tmp_path, keep_last=1).save(engine(), 20)
        assert store.steps() == [10, 20]
        return resume(engine_, path, **options)

    monkeypatch.setattr(checkpoints, "resume_checkpoint", save_meanwhile)
    resumed = store.resume(engine())
    assert resumed is not None
    assert resumed.step == 10
    store.save(engine(), 30)
    assert names(tmp_path) == ["step-00000030"]


def test_a_dead_reader_holds_nothing_back_and_leaves_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    store.save(engine(), 10)
    # This process's own id, but not one of its readers: a process of an earlier container.
    host, name = socket.gethostname(), "step-00000010"
    (tmp_path / unpublished_name(name, kind="reading", host=host, pid=os.getpid(), token="00ff00ff")).mkdir()
    store.save(engine(), 20)
    assert names(tmp_path) == ["step-00000020"]


def test_a_root_that_cannot_be_written_can_be_resumed_from(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(engine(), 10)

    def refuse(operation: files.Operation) -> None:
        raise PermissionError(30, "Read-only file system")

    with files.observed(refuse):
        resumed = store.resume(engine())
    assert resumed is not None
    assert resumed.step == 10


# -- what a save leaves --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["step-00000010", "step-10"])
def test_saving_a_step_again_is_refused_and_touches_nothing(tmp_path: Path, name: str) -> None:
    store = CheckpointStore(tmp_path)
    store.save(engine(), 10).rename(tmp_path / name)
    before = content(tmp_path)
    with pytest.raises(CheckpointExists) as caught:
        store.save(engine(), 10)
    assert isinstance(caught.value, FileExistsError)
    assert caught.value.where == str(tmp_path / name)
    assert content(tmp_path) == before


def test_an_incomplete_checkpoint_is_set_aside_when_training_comes_to_its_step_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    incomplete(tmp_path, 10)
    store = CheckpointStore(tmp_path)
    store.save(engine(), 10)
    assert store.steps() == [10]
    aside = [name for name in names(tmp_path) if name.startswith("step-00000010.incomplete-")]
    assert len(aside) == 1
    assert (tmp_path / aside[0] / "__0_0.distcp").read_bytes() == b"half"
    assert aside[0] in caplog.text


def test_old_checkpoints_expire_only_after_the_new_one_is_published(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    store.save(engine(), 10)
    store.save(engine(), 20)
    log: list[tuple[str, str]] = []
    with files.observed(lambda operation: log.append((operation.kind, operation.path.name))):
        store.save(engine(), 30)
    renames = [name for kind, name in log if kind == "rename"]
    assert renames[0].startswith("step-00000030.partial-")
    assert renames[1:] == ["step-00000010"]
    published = log.index(("rename", renames[0]))
    assert log[published + 1] == ("fsync", tmp_path.name)
    assert published < log.index(("rename", "step-00000010"))
    assert names(tmp_path) == ["step-00000020", "step-00000030"]


def test_nothing_expires_when_the_save_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    store.save(engine(), 10)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "save_checkpoint", fail)
    with pytest.raises(OSError, match="No space"):
        store.save(engine(), 20)
    assert store.steps() == [10]


def test_keep_every_and_incomplete_ones_do_not_count(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1, keep_every=20)
    for step in (10, 20, 30):
        store.save(engine(), step)
    incomplete(tmp_path, 35)
    store.save(engine(), 34)
    assert store.steps() == [20, 34]
    assert names(tmp_path) == ["step-00000020", "step-00000034", "step-00000035"]


def test_an_old_one_that_cannot_be_removed_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    store.save(engine(), 10)

    def refuse(operation: files.Operation) -> None:
        if operation.path.name == "step-00000010":
            raise PermissionError(13, "Permission denied")

    with files.observed(refuse):
        assert store.save(engine(), 20) == store.path(20)
    assert store.steps() == [10, 20]
    assert "Permission denied" in caplog.text


def test_only_the_coordinator_removes(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    store.save(engine(), 10)
    store.save(engine(is_coordinator=False), 20)
    assert store.steps() == [10, 20]


def test_the_next_save_removes_strays_of_dead_writers_and_nothing_foreign(tmp_path: Path) -> None:
    old = (1.0, 1.0)
    for final, kind in (("step-5", "partial"), ("step-4", "retired"), ("weights", "partial")):
        name = unpublished_name(final, kind=kind, host="elsewhere", pid=1, token="00ff00ff")  # type: ignore[arg-type]
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, old)
    for foreign in ("notes", "step-5.partial-mine", "step-12x"):
        (tmp_path / foreign).mkdir()
        os.utime(tmp_path / foreign, old)
    CheckpointStore(tmp_path).save(engine(), 10)
    assert names(tmp_path) == [
        "notes",
        "step-00000010",
        "step-12x",
        "step-5.partial-mine",
        "weights.partial-elsewhere-1-00ff00ff",
    ]
