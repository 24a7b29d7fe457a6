"""Kills are planned from a seed, where the run has room for them, and are due at their moment alone."""

import pytest

from kills import Kill, plan_kills


@pytest.mark.parametrize("steps, save_every", [(80, 10), (12, 3), (8, 2), (17, 4), (100, 7)])
@pytest.mark.parametrize("seed", range(20))
def test_a_plan_has_one_of_each_in_its_place(steps: int, save_every: int, seed: int) -> None:
    between, writing = plan_kills(steps, save_every, seed)
    assert between.moment == "between steps"
    assert save_every < between.step <= steps // 2
    assert between.step % save_every != 0
    assert writing.moment == "while writing"
    assert steps / 2 <= writing.step <= steps - save_every
    assert writing.step % save_every == 0
    assert between.step <= writing.step


def test_the_seed_decides() -> None:
    assert plan_kills(80, 10, 3) == plan_kills(80, 10, 3)
    assert len({str(plan_kills(80, 10, seed)) for seed in range(20)}) > 10


@pytest.mark.parametrize("steps, save_every", [(11, 3), (40, 1), (0, 10)])
def test_a_run_without_room_is_refused(steps: int, save_every: int) -> None:
    with pytest.raises(ValueError, match="save_every"):
        plan_kills(steps, save_every, 0)


def test_when_a_kill_is_due() -> None:
    between = Kill(moment="between steps", step=5)
    assert not between.is_due(4, {10})
    assert between.is_due(5, ())
    writing = Kill(moment="while writing", step=10, delay_seconds=0.05)
    assert not writing.is_due(50, ())
    assert not writing.is_due(50, {5})
    assert writing.is_due(10, {10})
    assert writing.after_a_miss(10) == Kill(moment="while writing", step=11)
