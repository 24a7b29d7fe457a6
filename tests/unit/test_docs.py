"""The documentation says what the code does: its scripts run, its command line and its names are there."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import orlop
from orlop.tools.drill.comparison import read_records
from orlop.tools.drill.runs import RUN_VARIABLE

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def scripts(page):
    """The Python blocks that are whole scripts."""
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    return [block for block in blocks if "argparse" in block]


def test_the_command_line_page_is_made_of_the_commands_own_help():
    command = [sys.executable, str(ROOT / "scripts" / "cli_docs.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, "python scripts/cli_docs.py writes docs/cli.md anew"


SCRIPTS = [
    ("quickstart.md", 0, 200, "metrics.jsonl"),
    ("recipes.md", 0, 50, "records.jsonl"),
    ("recipes.md", 1, 60, "metrics.jsonl"),
]


def test_every_script_is_tried():
    assert [(page, len(scripts(page))) for page in ("quickstart.md", "recipes.md")] == [
        ("quickstart.md", 1),
        ("recipes.md", 2),
    ]


@pytest.mark.parametrize("page, index, steps, name", SCRIPTS)
def test_the_scripts_run_and_leave_sound_checkpoints(tmp_path, page, index, steps, name):
    script = scripts(page)[index]
    command = [sys.executable, "-c", script, "--run", str(tmp_path / "run")]
    # As in a drill, where `orlop.record` has something to do.
    drilled = {**os.environ, RUN_VARIABLE: str(tmp_path / "run")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=drilled)
    assert done.returncode == 0, done.stderr
    newest = orlop.CheckpointStore(tmp_path / "run").steps()[-1]
    assert newest == steps
    faults = [found for found in orlop.verify(tmp_path / "run" / f"step-{newest:08d}") if found.is_fault]
    assert faults == []
    assert [record["step"] for record in read_records(tmp_path / "run" / name)] == list(range(1, steps + 1))


def documented():
    return re.findall(r"^::: (\S+)$", (DOCS / "api.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("name", documented())
def test_every_documented_name_is_there(name):
    module, _, attribute = name.rpartition(".")
    if name == "orlop.errors":
        assert importlib.import_module(name).__doc__
    else:
        assert getattr(importlib.import_module(module), attribute).__doc__


def test_every_page_is_in_the_site():
    listed = (ROOT / "mkdocs.yml").read_text()
    assert [page.name for page in DOCS.glob("*.md") if page.name not in listed] == []
