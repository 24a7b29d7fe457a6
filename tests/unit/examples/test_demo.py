"""The demo, on a stand-in for the training: its tables, its picture, and that a signal ends it cleanly."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console
from tests.unit.tools.drill.test_drilling import STAND_IN, running_in

import demo


@pytest.mark.parametrize("fault, code", [("none", 0), ("forgets", 1)])
def test_tables_picture_and_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, code: int
) -> None:
    words = [sys.executable, str(STAND_IN), "{run}", "12", "3", fault]
    monkeypatch.setattr(demo, "command", lambda options: words)
    monkeypatch.chdir(tmp_path)  # a drill looks around there
    console = Console(record=True, width=140)
    out = tmp_path / "out"
    assert demo.run_demo(demo.parse_options(["--out", str(out), "--seed", "3"]), console) == code
    text = console.export_text()
    assert "while writing step" in text
    assert ("identical" if code == 0 else "DIFFERENT, first in loss: step ") in text
    assert (out / "losses.png").stat().st_size > 10_000
    assert running_in(out) == []


def test_the_command_is_the_example_under_torchrun() -> None:
    words = demo.command(demo.parse_options(["--steps", "16", "--seed", "2"]))
    assert words[words.index("--") + 1 :] == [
        str(demo.EXAMPLE), "--run", "{run}", "--steps", "16", "--save-every", "10", "--seed", "2",
    ]  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_demo_and_every_process(tmp_path: Path, number: signal.Signals) -> None:
    out = tmp_path / "out"
    words = f"[sys.executable, {str(STAND_IN)!r}, '{{run}}', '999', '3', 'none']"
    # Shells start background jobs with SIGINT ignored, and children inherit that: not what is tried here.
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    script = f"{heard}; import sys, demo; demo.command = lambda options: {words}; sys.exit(demo.main())"
    child = subprocess.Popen(
        [sys.executable, "-c", script, "--out", str(out)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(demo.__file__).parent), *sys.path])},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        metrics = out / "uninterrupted" / "metrics.jsonl"
        deadline = time.monotonic() + 30
        while not metrics.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert len(running_in(out)) == 3  # the demo, its launcher, its worker
        child.send_signal(number)
        said, _ = child.communicate(timeout=30)
    finally:
        child.kill()
    assert child.returncode == (130 if number == signal.SIGINT else 128 + number)
    assert running_in(out) == []
    if number == signal.SIGINT:
        assert "interrupted" in said
