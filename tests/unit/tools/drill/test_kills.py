"""Kills are planned from a seed, where the run has room for them, and are due at their moment alone."""

import pytest

from orlop.tools.drill.kills import Kill, plan_kills


def plan(num_steps=80, save_every=10, count=2, during_save=True, seed=0):
    steps = range(1, num_steps + 1)
    saved = [step for step in steps if step % save_every == 0]
    return plan_kills(steps, saved, count=count, during_save=during_save, step_seconds=0.2, seed=seed)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(10))
def test_a_plan_has_kills_of_both_moments_before_the_end(count, seed):
    kills = plan(count=count, seed=seed)
    assert len(kills) == count
    assert [kill.step for kill in kills] == sorted(kill.step for kill in kills)
    writing = [kill for kill in kills if kill.moment == "while writing"]
    assert len(writing) == (count + 1) // 2
    assert all(kill.step % 10 == 0 and kill.step < 80 for kill in writing)
    assert all(kill.step < 80 for kill in kills)
    assert all(0 <= kill.delay_seconds <= 0.2 for kill in kills)


def test_without_during_save_all_are_between_steps():
    assert {kill.moment for kill in plan(count=4, during_save=False)} == {"between steps"}


def test_the_seed_decides():
    assert plan(seed=3) == plan(seed=3)
    assert len({str(plan(seed=seed)) for seed in range(20)}) > 10


@pytest.mark.parametrize("num_steps, save_every, count", [(2, 1, 4), (9, 10, 1), (1, 1, 1)])
def test_a_run_without_room_is_refused(num_steps, save_every, count):
    with pytest.raises(ValueError, match="too few"):
        plan(num_steps, save_every, count)


def test_when_a_kill_is_due():
    between = Kill(moment="between steps", step=5)
    assert not between.is_due(4, {10})
    assert between.is_due(5, ())
    writing = Kill(moment="while writing", step=10, delay_seconds=0.05)
    assert not writing.is_due(50, ())
    assert not writing.is_due(50, {5})
    assert writing.is_due(10, {10})
    assert writing.after_a_miss(10) == Kill(moment="while writing", step=11)
