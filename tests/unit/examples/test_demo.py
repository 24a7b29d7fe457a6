"""The demo's driver, on a stand-in for the training: what it says, and that it notices what is wrong."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

import demo
import processes
import runs
from kills import Kill

STAND_IN = Path(__file__).with_name("stand_in_training.py")


@pytest.fixture
def console() -> Console:
    return Console(record=True, width=140)


def run(monkeypatch: pytest.MonkeyPatch, console: Console, out: Path, fault: str, seed: int = 0) -> int:
    def command(self: demo.Run) -> list[str]:
        return [sys.executable, *map(str, (STAND_IN, self.directory, self.steps, self.save_every, fault))]

    monkeypatch.setattr(demo.Run, "command", property(command))
    options = ["--steps", "12", "--save-every", "3", "--seed", str(seed), "--out", str(out)]
    try:
        return demo.run_demo(demo.parse_options(options), console)
    finally:
        assert running_in(out) == []


def running_in(out: Path) -> list[str]:
    """The command lines of the processes, anywhere on this machine, that work on `out`."""
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
def test_an_exact_run_is_identical(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, console: Console, seed: int
) -> None:
    assert run(monkeypatch, console, tmp_path, "none", seed) == 0
    text = console.export_text()
    assert "while writing step" in text
    assert text.rstrip().splitlines()[-2].strip() == "identical"
    assert (tmp_path / "losses.png").stat().st_size > 10_000


def test_a_run_that_forgets_is_different_and_the_first_step_and_leaf_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, console: Console
) -> None:
    assert run(monkeypatch, console, tmp_path, "forgets") == 1
    text = console.export_text()
    assert "DIFFERENT, first in loss: step " in text
    assert "data.rank_0: 01 and 02" in text


def test_a_write_that_was_over_too_soon_is_said_and_the_next_one_is_hit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, console: Console
) -> None:
    kill = Kill(moment="while writing", step=6, delay_seconds=0.25)
    monkeypatch.setattr(demo, "plan_kills", lambda *_: [kill])
    assert run(monkeypatch, console, tmp_path, "quick") == 0
    text = console.export_text()
    assert "the write was over before the kill struck: trying the next save" in text
    assert "while writing step 9" in text


def test_a_kill_that_never_happened_fails_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, console: Console
) -> None:
    with pytest.raises(demo.RunFailed, match="finished before it could be killed while writing"):
        run(monkeypatch, console, tmp_path, "never saves")


def test_a_run_that_fails_ends_the_demo_with_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, console: Console
) -> None:
    with pytest.raises(demo.RunFailed, match=r"exit code 1(.|\n)*something went wrong"):
        run(monkeypatch, console, tmp_path, "fails")


def test_a_run_that_stalls_ends_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, console: Console
) -> None:
    monkeypatch.setattr(runs, "STALLED_SECONDS", 0.2)
    with pytest.raises(demo.RunFailed, match="no step for"):
        run(monkeypatch, console, tmp_path, "none")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_demo_and_every_process(tmp_path: Path, number: signal.Signals) -> None:
    words = f"[sys.executable, {str(STAND_IN)!r}, str(run.directory), '999', '3', 'none']"
    script = f"import sys, demo; demo.Run.command = property(lambda run: {words}); sys.exit(demo.main())"
    child = subprocess.Popen(
        [sys.executable, "-c", script, "--out", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(Path(demo.__file__).parent)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        metrics = tmp_path / "uninterrupted" / "metrics.jsonl"
        deadline = time.monotonic() + 30
        while not metrics.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert len(running_in(tmp_path)) == 3  # the demo, its launcher, its worker
        child.send_signal(number)
        said, _ = child.communicate(timeout=30)
    finally:
        child.kill()
    assert child.returncode == (130 if number == signal.SIGINT else 128 + number)
    assert running_in(tmp_path) == []
    if number == signal.SIGINT:
        assert "interrupted" in said
