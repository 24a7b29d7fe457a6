"""A world of one rank: nothing is sent, errors keep their type."""

import pytest
from torch.distributed.checkpoint import CheckpointException

from orlop.errors import (
    CheckpointCorrupt,
    CheckpointMismatch,
    RankFailed,
    StorageFull,
    StorageRefused,
)
from orlop.ranks import Ranks


def test_without_a_process_group_the_world_is_one_rank():
    ranks = Ranks.create()
    assert (ranks.rank, ranks.world_size, ranks.is_coordinator, ranks.group) == (0, 1, True, None)
    assert ranks.gather("x") == ["x"]
    assert ranks.broadcast("x") == "x"
    assert ranks.sum(0.5) == 0.5


def test_an_own_error_keeps_its_type_and_fields():
    with pytest.raises(CheckpointMismatch) as caught, Ranks.create().together("check"):
        raise CheckpointMismatch("differs", where="leaf", todo="mend it")
    assert (caught.value.what, caught.value.where, caught.value.todo) == ("differs", "leaf", "mend it")


def test_torchs_checkpoint_exception_is_translated_to_its_first_real_cause():
    wrapped = CheckpointException("read", {3: (CheckpointCorrupt("bad block", where="file 3"), None)})
    with pytest.raises(CheckpointCorrupt, match="bad block"), Ranks.create().together("read"):
        raise wrapped


def test_a_foreign_error_becomes_rank_failed_and_keeps_its_cause():
    with pytest.raises(RankFailed, match="OSError: disk full") as caught, Ranks.create().together("write"):
        raise OSError("disk full")
    assert isinstance(caught.value.__context__, OSError)  # for debuggers; no traceback shows it
    assert caught.value.__suppress_context__


def test_what_the_system_refuses_at_a_path_is_said_with_the_path_and_without_a_line_of_code(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageRefused) as caught, Ranks.create().together("begin a checkpoint"):
        (tmp_path / "file" / "x").mkdir()
    assert caught.value.what == "could not begin a checkpoint: Not a directory"
    assert caught.value.where == str(tmp_path / "file" / "x")
    assert caught.value.todo.startswith("something that is no directory stands in this path")
    assert isinstance(caught.value, OSError)
    assert ".py" not in str(caught.value)


def test_a_full_disk_is_storage_full_wherever_it_shows():
    with (
        pytest.raises(StorageFull, match="could not write: No space left") as caught,
        Ranks.create().together("write"),
    ):
        raise OSError(28, "No space left on device")
    assert caught.value.todo.startswith("make room")
