"""Run the tests under every supported torch, each in a virtual environment of its own, and write `docs/compat.md`.

    make compat                            all versions: some 5 GB of downloads for each, removed afterwards
    make compat COMPAT="2.6.0 2.15.0"      some of them: a table is printed, the page stays as it is
    make compat COMPAT="--venvs DIR"       keep the environments in DIR, and use those that are there

Unit, golden and dist tests run; dist tests that need FSDP2 on the CPU skip themselves where torch lacks it. Exits with
1 when any test failed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

VERSIONS = ("2.6.0", "2.9.1", "2.10.0", "2.13.0", "2.15.0")
SUITES = ("unit", "golden", "dist")
ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "compat.md"
INTRO = """\
# Torch versions

orlop runs on torch 2.6 to 2.15. What differs between them is in `src/orlop/compat.py` and nowhere else. `make compat`
runs the unit, golden and dist tests under the versions below, each in an environment of its own, and wrote this page.
The golden tests read checkpoints that plain torch of each of these versions wrote (`tests/golden/write.py`), in both of
torch's optimizer layouts, and compare every bit.

"""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """How one suite ended under one torch."""

    passed: int = 0
    failed: list[str] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        parts = [f"{self.passed} passed"]
        if self.failed:
            parts.append(f"**{len(self.failed)} failed**")
        if self.skipped:
            parts.append(f"{self.skipped.total()} skipped")
        return ", ".join(parts)


@dataclass(slots=True, kw_only=True)
class Row:
    """One torch version and its suites."""

    version: str
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def is_good(self) -> bool:
        """Whether tests ran and none failed."""
        return all(outcome.passed and not outcome.failed for outcome in self.outcomes.values())


def make_venv(version: str, folder: Path) -> Path:
    """The Python of an environment with this torch and the development tools; made where it is not there."""
    python = folder / "bin" / "python"
    if not (folder / ".ready").exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pins = (ROOT / "constraints.txt").read_text().splitlines()
        constraints = folder / "constraints.txt"
        constraints.write_text(
            "\n".join(f"torch=={version}" if pin.startswith("torch==") else pin for pin in pins) + "\n"
        )
        # In the environment rather than on the command line: then the user's own constraints don't count.
        environment = {**os.environ, "PIP_CONSTRAINT": str(constraints)}
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, "-e", f"{ROOT}[dev]"], check=True, env=environment)
        (folder / ".ready").touch()
    return python


def run_suite(python: Path, suite: str, workers: str, options: list[str]) -> Outcome:
    """Run `tests/<suite>` and count."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [python, "-m", "pytest", f"tests/{suite}", "-n", workers, "-p", "no:cacheprovider"]
        subprocess.run([*command, f"--junitxml={report}", *options], cwd=ROOT, env=environment)
        return read_report(report)


def read_report(path: Path) -> Outcome:
    """Count a JUnit report."""
    outcome = Outcome()
    if not path.exists():
        outcome.failed.append("pytest wrote no report")
        return outcome
    for case in ElementTree.parse(path).iter("testcase"):
        skip = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            outcome.failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif skip is not None:
            outcome.skipped[skip.get("message") or "no reason given"] += 1
        else:
            outcome.passed += 1
    return outcome


def render(rows: list[Row]) -> str:
    """The table, then what failed and what was skipped."""
    lines = ["| torch | " + " | ".join(SUITES) + " | minutes |", "| --- |" + " --- |" * (len(SUITES) + 1)]
    for row in rows:
        cells = " | ".join(str(row.outcomes[suite]) for suite in SUITES)
        lines.append(f"| {row.version} | {cells} | {row.seconds / 60:.1f} |")
    failed = [
        f"- {row.version}: `{test}`" for row in rows for o in row.outcomes.values() for test in o.failed
    ]
    if failed:
        lines += ["", "Failed:", "", *failed]
    skipped: dict[str, list[str]] = {}
    for row in rows:
        for reason, count in sum((o.skipped for o in row.outcomes.values()), Counter()).items():
            skipped.setdefault(reason, []).append(f"{row.version} ({count})")
    if skipped:
        lines += ["", "Skipped, and why:", ""]
        lines += [f"- {reason}: {', '.join(where)}" for reason, where in sorted(skipped.items())]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description="Run the tests under every supported torch.")
    parser.add_argument(
        "versions", nargs="*", default=VERSIONS, help="torch versions; by default all supported"
    )
    parser.add_argument("--venvs", type=Path, help="a folder that keeps the environments")
    parser.add_argument("--workers", default="2", help="pytest processes")
    parser.add_argument("--pytest", default="", help="more options for pytest, as one text")
    options = parser.parse_args()
    rows = []
    for version in options.versions:
        row = Row(version=version)
        start = time.monotonic()
        kept = options.venvs is not None
        folder = (
            (options.venvs / version).absolute() if kept else Path(tempfile.mkdtemp(prefix="orlop-compat-"))
        )
        try:
            python = make_venv(version, folder)
            for suite in SUITES:
                print(f"== torch {version}: {suite}", flush=True)
                row.outcomes[suite] = run_suite(python, suite, options.workers, options.pytest.split())
        finally:
            if not kept:
                shutil.rmtree(folder)
        row.seconds = time.monotonic() - start
        rows.append(row)
        print(render(rows), flush=True)
    if tuple(options.versions) == VERSIONS and not options.pytest:
        PAGE.write_text(INTRO + render(rows))
    return 0 if all(row.is_good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
