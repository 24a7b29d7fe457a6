"""Ranks that gather, sum and fail together, in real processes."""

import os
import signal
import time
import traceback

import pytest
import torch.distributed as dist

from orlop.errors import CheckpointMismatch, RankFailed
from orlop.ranks import Ranks
from orlop.testing import run_ranks

pytestmark = pytest.mark.dist


def _talk(rank):
    ranks = Ranks.create()
    again = Ranks.create()
    return (
        ranks.gather(rank * 10),
        ranks.broadcast(f"from {rank}", src=1),
        ranks.sum(0.1 * (rank + 1)),
        ranks.equal("x"),
        ranks.equal(rank),
        again.group is ranks.group,
        ranks.group is not dist.group.WORLD,
        ranks.on_coordinator("answer", lambda: 42),
    )


def test_ranks_gather_broadcast_and_sum_in_rank_order():
    both = run_ranks(_talk, 2)
    assert both == [([0, 10], "from 1", 0.1 + 0.2, True, False, True, True, 42)] * 2


class Unpicklable(Exception):
    def __init__(self, *, code):
        super().__init__(f"code {code}")
        self.lock = open(os.devnull)  # noqa: SIM115


def _outcome(block):
    try:
        block()
    except BaseException as error:
        shown = "".join(traceback.format_exception(error))
        assert shown.count("Traceback (most recent call last)") == 1  # no chain, on no rank
        return type(error).__name__, str(error), type(error.__context__).__name__
    return "passed", "", ""


def _fail_one(rank):
    ranks = Ranks.create()

    def typed():
        with ranks.together("check"):
            if rank == 1:
                raise CheckpointMismatch("shapes differ", where="model.w", expected="2x2", found="3x3")

    def foreign():
        with ranks.together("write"):
            if rank == 1:
                raise Unpicklable(code=7)

    def interrupted():
        with ranks.together("wait"):
            if rank == 1:
                raise KeyboardInterrupt

    return [_outcome(typed), _outcome(foreign), _outcome(interrupted), ranks.gather(rank)]


def test_one_ranks_failure_is_the_same_typed_error_on_all():
    first, second = run_ranks(_fail_one, 2)
    assert first[0][:2] == second[0][:2]
    assert first[0][0] == "CheckpointMismatch"
    assert "rank 1" in first[0][1]
    assert "model.w" in first[0][1]
    assert first[1][:2] == second[1][:2]
    assert first[1][0] == "RankFailed"
    assert "Unpicklable: code 7" in first[1][1]
    assert (first[1][2], second[1][2]) == ("NoneType", "Unpicklable")
    assert (first[2][0], second[2][0]) == ("RankFailed", "KeyboardInterrupt")
    assert first[3] == second[3] == [0, 1]


def _die(rank):
    ranks = Ranks.create()
    with ranks.together("die"):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_rank_is_noticed_and_no_process_is_left():
    start = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        run_ranks(_die, 2, timeout_seconds=60)
    assert time.monotonic() - start < 40
    assert "rank 1 ---\ndied with exit code -9" in str(caught.value)
    assert "a rank went away; could not die" in str(caught.value)


def _hang(rank):
    if rank == 1:
        time.sleep(60)
    return rank


def test_a_rank_that_hangs_is_killed_and_its_stack_shown():
    with pytest.raises(RankFailed, match="did not end in time") as caught:
        run_ranks(_hang, 2, timeout_seconds=4)
    assert "in _hang" in str(caught.value)
    assert "rank 0 ---" not in str(caught.value)


def _again(rank, folder):
    first = Ranks.create()
    assert first.gather(rank) == [0, 1]
    dist.destroy_process_group()
    assert Ranks.create().world_size == 1
    dist.init_process_group("gloo", init_method=f"file://{folder}/again", rank=rank, world_size=2)
    second = Ranks.create()
    assert second.group is not first.group
    return second.gather(rank)


def test_a_new_default_group_gets_a_new_control_group(tmp_path):
    assert run_ranks(_again, 2, str(tmp_path)) == [[0, 1], [0, 1]]
