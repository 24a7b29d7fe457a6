"""The README's example is run as it stands, and its commands are the Makefile's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.DOTALL)


def run(words, folder):
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # `python` is this one
    return subprocess.run(
        words,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PATH": path, "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """A folder in which the example was saved and run."""
    folder = tmp_path_factory.mktemp("readme")
    (source,) = blocks("python")
    (folder / "train.py").write_text(source)
    done = run([sys.executable, "-W", "error::UserWarning", "train.py", "run"], folder)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    return folder


def test_the_example_runs_and_runs_again(example):
    again = run([sys.executable, "train.py", "run"], example)
    assert again.returncode == 0, again.stderr
    assert "already complete" in again.stderr
    assert sorted(path.name for path in (example / "run").glob("step-*")) == [
        "step-00000030",
        "step-00000040",
    ]
    assert len((example / "run" / "metrics.jsonl").read_text().splitlines()) == 40


SHOWN = re.findall(r"^\$ (orlop .*)\n((?:(?!\$).*\n)*)", "\n".join(blocks("console")), re.MULTILINE)


def test_the_readme_shows_what_it_should():
    assert [command.split()[1] for command, _ in SHOWN] == ["ls", "verify", "drill"]


@pytest.mark.parametrize("command, output", SHOWN, ids=[command.split()[1] for command, _ in SHOWN])
def test_the_commands_give_what_the_readme_shows(example, command, output):
    done = run([sys.executable, "-m", "orlop.cli", *command.split()[1:]], example)
    assert done.returncode == 0, done.stderr
    assert list(map(shape_of, done.stdout.strip().splitlines())) == list(
        map(shape_of, output.strip().splitlines())
    )


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
