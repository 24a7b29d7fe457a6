"""The command line: what it prints, its exit codes, and that it starts without torch."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from orlop.store import files
from orlop.store.manifest import Manifest, write_manifest
from orlop.version import __version__

RUN_MAIN = "import sys; from orlop.cli import main\ntry:\n    main()\nfinally:\n    "
FORBIDDEN = (
    "found = {'torch', 'numpy'} & set(sys.modules)\n    if found: print('imported', found, file=sys.stderr)"
)


def orlop(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "120", "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, "-c", RUN_MAIN + FORBIDDEN, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step, whole in ((10, True), (20, False)):
        path = tmp_path / f"step-{step:08d}"
        path.mkdir()
        (path / ".metadata").write_bytes(b"m" * 2000)
        sizes = files.file_sizes(path) if whole else {**files.file_sizes(path), "__1_0.distcp": 7}
        write_manifest(path, Manifest(step=step, torch_version="2", world_size=2, files=sizes))
    return tmp_path


def test_version() -> None:
    result = orlop("--version")
    assert (result.returncode, result.stdout, result.stderr) == (0, f"orlop {__version__}\n", "")


def test_ls_shows_what_is_complete_and_why_not(run: Path) -> None:
    result = orlop("ls", run)
    assert (result.returncode, result.stderr) == (0, "")
    first, second = result.stdout.splitlines()[1:]
    assert first.split()[0] == "10"
    assert first.rstrip().endswith("complete")
    assert "kB" in first
    assert second.split()[0] == "20"
    assert "__1_0.distcp is missing" in second


def test_ls_json(run: Path) -> None:
    result = orlop("ls", run, "--json")
    assert (result.returncode, result.stderr) == (0, "")
    first, second = json.loads(result.stdout)
    assert (first["step"], first["world_size"], first["complete"], first["why_not"]) == (10, 2, True, None)
    assert first["path"] == str(run / "step-00000010")
    assert first["size_bytes"] == sum(files.file_sizes(run / "step-00000010").values())
    assert (second["complete"], second["why_not"]) == (False, "__1_0.distcp is missing")


def test_ls_of_an_empty_run(tmp_path: Path) -> None:
    result = orlop("ls", tmp_path)
    assert (result.returncode, result.stdout) == (0, f"no checkpoints in {tmp_path}\n")
    assert orlop("ls", tmp_path, "--json").stdout == "[]\n"


def test_ls_of_nothing_is_one_message_and_exit_code_1(tmp_path: Path) -> None:
    result = orlop("ls", tmp_path / "nowhere")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("CheckpointNotFound: ")
    assert str(tmp_path / "nowhere") in result.stderr
    assert "Traceback" not in result.stderr


def test_ls_starts_quickly(run: Path) -> None:
    # The budget is 0.3 s on a quiet machine; the best of five keeps neighbours out. Torch alone takes 1 s.
    best = min(_seconds(run) for _ in range(5))
    assert best < 0.6


def _seconds(run: Path) -> float:
    start = time.perf_counter()
    assert orlop("ls", run).returncode == 0
    return time.perf_counter() - start
