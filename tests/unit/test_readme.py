"""The README's example is run as it stands, and its commands are the Makefile's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.DOTALL)


def run_example(folder):
    (example,) = blocks("python")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "error::UserWarning", "-c", example]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200, check=False
    )


def test_the_example_runs_and_runs_again(tmp_path):
    for _ in range(2):
        done = run_example(tmp_path)
        assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "run").glob("step-*")) == [
        "step-00000030",
        "step-00000040",
    ]
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 40


def test_the_commands_give_what_the_readme_shows(tmp_path):
    assert run_example(tmp_path).returncode == 0
    shown = re.findall(r"^\$ (orlop .*)\n((?:(?!\$).*\n)*)", "\n".join(blocks("console")), re.MULTILINE)
    assert len(shown) == 2
    for command, output in shown:
        done = subprocess.run(
            [sys.executable, "-m", "orlop.cli", *command.split()[1:]],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "100"},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert [shape_of(line) for line in done.stdout.splitlines()] == [
            shape_of(line) for line in output.splitlines()
        ]


def shape_of(line):
    """A line without what differs from run to run: times, sizes, versions."""
    return re.sub(r"\s+", " ", re.sub(r"\d[\d.:+\-]*\w*", "#", line)).strip()


def test_the_example_is_short():
    (example,) = blocks("python")
    assert len([line for line in example.splitlines() if line.strip()]) <= 20


def test_the_commands_are_targets_of_the_makefile():
    makefile = (README.parent / "Makefile").read_text()
    targets = re.findall(r"^\$ make (\S+)", "\n".join(blocks("console")), re.MULTILINE)
    assert targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
