"""The drill, on a stand-in for the training: what it says, and that it notices what is wrong."""

import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from orlop.tools.drill import drilling, elsewhere, processes, runs
from orlop.tools.drill.drilling import DrillOptions, drill
from orlop.tools.drill.kills import Kill
from orlop.tools.drill.runs import RunFailed

STAND_IN = Path(__file__).with_name("stand_in_training.py")


class Heard:
    def __init__(self):
        self.steps = {}
        self.events = []

    def on_step(self, run, step):
        self.steps[run] = max(step, self.steps.get(run, 0))

    def on_event(self, run, text):
        self.events.append(text)


def run(out, fault, where="{run}", **options):
    command = [sys.executable, str(STAND_IN), where, "12", "3", fault]
    heard = Heard()
    try:
        return drill(command, DrillOptions(out=out, **options), heard), heard
    finally:
        assert running_in(out) == []


def running_in(out):
    found = []
    for entry in processes.PROC.iterdir():
        try:
            command = (entry / "cmdline").read_text() if entry.name.isdigit() else ""
        except OSError:
            continue
        if str(out) in command and "stand_in_training" in command:
            found.append(command)
    return found


@pytest.mark.parametrize("seed", [0, 1])
def test_an_exact_run_is_identical(tmp_path, seed):
    result, heard = run(tmp_path / "out", "none", during_save=True, seed=seed)
    assert result.is_identical, result.rows
    assert {killed.kill.moment for killed in result.kills} == {"between steps", "while writing"}
    assert all(killed.processes == 2 for killed in result.kills)
    assert heard.steps == {"uninterrupted": 12, "killed": 12}
    assert result.step == 12
    assert result.hint is None


def test_a_run_that_forgets_is_different_and_the_first_step_and_leaf_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(drilling, "plan_kills", lambda *_, **__: [Kill(moment="between steps", step=5)])
    result, _ = run(tmp_path / "out", "forgets")
    found = {row.what: row.difference for row in result.rows if row.difference}
    assert found["loss"].startswith("step ")
    assert found["sampler"] == "data.rank_0: 01 and 02"
    assert "position" in result.hint


def test_a_run_that_starts_anew_instead_of_resuming_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(drilling, "plan_kills", lambda *_, **__: [Kill(moment="between steps", step=8)])
    with pytest.raises(RunFailed, match="does not go on from its newest checkpoint"):
        run(tmp_path / "out", "starts anew")


def test_a_write_that_was_over_too_soon_is_said_and_the_next_one_is_hit(tmp_path, monkeypatch):
    kill = Kill(moment="while writing", step=6, delay_seconds=0.25)
    monkeypatch.setattr(drilling, "plan_kills", lambda *_, **__: [kill])
    result, heard = run(tmp_path / "out", "quick")
    assert result.is_identical
    assert "the write was over before the kill struck: trying the next save" in heard.events
    assert result.kills[0].writing == 9


def test_a_run_that_never_saves_is_refused_before_anything_is_killed(tmp_path):
    with pytest.raises(RunFailed, match="no resume to try"):
        run(tmp_path / "out", "never saves", during_save=True)
    assert not (tmp_path / "out" / "killed").exists()


def test_a_run_that_saves_elsewhere_is_refused_before_anything_is_killed(tmp_path):
    with pytest.raises(RunFailed, match=r"outside of \{run\}"):
        run(tmp_path / "out", "saves elsewhere")
    assert (tmp_path / "out" / "elsewhere" / "step-00000012").is_dir()
    assert not (tmp_path / "out" / "killed").exists()


def test_a_run_that_fails_ends_the_drill_with_its_output(tmp_path):
    with pytest.raises(RunFailed, match=r"exit code 1(.|\n)*something went wrong"):
        run(tmp_path / "out", "fails")


def test_a_run_that_stalls_ends_the_drill(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "STALLED_SECONDS", 0.2)
    with pytest.raises(RunFailed, match="no step for"):
        run(tmp_path / "out", "none")


def test_only_the_chosen_rank_is_killed_and_the_rest_end_by_themselves(tmp_path):
    result, _ = run(tmp_path / "out", "ranks", kills=1, ranks=(1,))
    assert result.is_identical, result.rows
    assert result.kills[0].processes == 1


def test_ranks_that_are_not_there_are_refused(tmp_path):
    with pytest.raises(RunFailed, match=r"ranks \[7\]"):
        run(tmp_path / "out", "none", kills=1, ranks=(7,))


def test_a_command_without_a_place_for_the_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="run"):
        drill(["true"], DrillOptions(out=tmp_path / "out"), Heard())
    assert not (tmp_path / "out").exists()


def test_a_command_that_writes_elsewhere_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    command = [sys.executable, str(STAND_IN), str(tmp_path / "elsewhere"), "12", "3", "none", "{run}"]
    with pytest.raises(RunFailed, match=r"elsewhere/fingerprint\.json, elsewhere/metrics\.jsonl"):
        drill(command, DrillOptions(out=tmp_path / "out"), Heard())
    assert not (tmp_path / "out" / "killed").exists()


def test_a_log_in_the_current_directory_is_refused_before_anything_is_killed(tmp_path, here):
    with pytest.raises(RunFailed, match=r"outside of \{run\}.*: train\.log\n(.|\n)*--may-write train\.log"):
        run(tmp_path / "out", "logs")
    assert not (tmp_path / "out" / "killed").exists()


def test_what_may_be_written_is_no_matter(tmp_path, here):
    result, _ = run(tmp_path / "out", "logs", kills=1, may_write=("*.log",))
    assert result.is_identical, result.rows
    assert (here / "train.log").exists()


@pytest.mark.parametrize("earlier", [False, True])
def test_the_advice_leads_out_of_a_refusal_where_each_start_names_its_directory(tmp_path, here, earlier):
    if earlier:
        (here / "runs").mkdir()
    with pytest.raises(RunFailed, match="outside of") as refused:
        run(tmp_path / "out", "traces", kills=1)
    (pattern,) = re.findall(r"--may-write (\S+)", str(refused.value))
    assert shlex.split(pattern) == ["runs/*" if earlier else "runs"]
    result, _ = run(tmp_path / "out", "traces", kills=1, may_write=shlex.split(pattern))
    assert result.is_identical, result.rows


@pytest.mark.parametrize("fault", ["holds", "replaces"])
def test_a_file_anywhere_that_is_held_open_is_refused(tmp_path_factory, tmp_path, monkeypatch, fault):
    far = tmp_path_factory.mktemp("far")
    monkeypatch.setenv("STAND_IN_FILE", str(far / "state"))
    monkeypatch.setattr(elsewhere, "LOOK_PAUSES", 1.0)  # however slow this machine is
    with pytest.raises(RunFailed, match=rf": {far}/state\n"):
        run(tmp_path / "out", fault)
    assert not (tmp_path / "out" / "killed").exists()


def test_also_the_second_run_is_refused_what_it_writes_elsewhere_and_the_comparison_is_told(
    tmp_path, monkeypatch
):
    far = tmp_path / "out" / "uninterrupted" / "state"
    monkeypatch.setenv("STAND_IN_FILE", str(far))
    with pytest.raises(
        RunFailed, match=r"killed: outside of \{run\}.*: out/uninterrupted/state\n"
    ) as refused:
        run(tmp_path / "out", "holds", kills=1)
    assert str(refused.value).endswith("but for that, the two runs are identical")


def test_that_there_is_more_than_is_looked_at_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(elsewhere, "LIMIT", 3)
    for name in "abcd":
        (tmp_path / name).touch()
    heard = Heard()
    command = [sys.executable, str(STAND_IN), "{run}", "12", "3", "never saves"]
    with pytest.raises(RunFailed, match="no resume to try"):
        drill(command, DrillOptions(out=tmp_path / "out"), heard)
    assert sum("is not noticed" in event for event in heard.events) == 1


def test_only_an_earlier_drill_is_removed(tmp_path):
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / "mine").write_text("x")
    with pytest.raises(ValueError, match="not empty"):
        drill(["true", "{run}"], DrillOptions(out=tmp_path), Heard())
    assert (tmp_path / "killed" / "mine").read_text() == "x"
    assert os.listdir(tmp_path) == ["killed"]
