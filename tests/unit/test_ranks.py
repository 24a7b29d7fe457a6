"""A world of one rank: nothing is sent, errors keep their type."""

import pytest
from torch.distributed.checkpoint import CheckpointException

from orlop.errors import CheckpointCorrupt, CheckpointMismatch, RankFailed
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
