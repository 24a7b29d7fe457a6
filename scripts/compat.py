"""Run the tests under every supported torch, each in a virtual environment of its own, and write `docs/compat.md`.

    make compat                            all versions: some 5 GB of downloads for each, removed afterwards
    make compat COMPAT="2.6.0 2.15.0"      some of them: their rows of the page are written anew
    make compat COMPAT="--venvs DIR"       keep the environments in DIR, and use those that are there

Unit, golden and dist tests run; dist tests that need FSDP2 on the CPU skip themselves where torch lacks it. Exits with
1 when any test failed.
"""

from __future__ import annotations

import argparse
import os
import re
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
runs the unit, golden and dist tests under the versions below, each in an environment of its own, and wrote this page;
each row is that version's last run. The golden tests read checkpoints that plain torch of each of these versions wrote
(`tests/golden/write.py`), in both of torch's optimizer layouts, and compare every bit.

"""


@dataclass(slots=True, kw_only=True)
class Row:
    """One torch version: how each suite ended, which tests failed, and why others were skipped."""

    version: str
    cells: dict[str, str] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    minutes: float = 0.0

    @property
    def is_good(self) -> bool:
        """Whether tests ran in every suite and none failed."""
        return not self.failed and not any(cell.startswith("0 passed") for cell in self.cells.values())

    def add(self, suite: str, report: Path) -> None:
        """Count a JUnit report."""
        if not report.exists():
            self.failed.append(f"{suite}: pytest wrote no report")
            self.cells[suite] = "0 passed"
            return
        passed, failed, skipped = 0, 0, 0
        for case in ElementTree.parse(report).iter("testcase"):
            skip = case.find("skipped")
            if case.find("failure") is not None or case.find("error") is not None:
                self.failed.append(f"{case.get('classname')}::{case.get('name')}")
                failed += 1
            elif skip is not None:
                self.skipped[skip.get("message") or "no reason given"] += 1
                skipped += 1
            else:
                passed += 1
        parts = [
            f"{passed} passed",
            f"**{failed} failed**" if failed else "",
            f"{skipped} skipped" if skipped else "",
        ]
        self.cells[suite] = ", ".join(filter(None, parts))


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


def run_suite(python: Path, suite: str, workers: str, options: list[str], row: Row) -> None:
    """Run `tests/<suite>` and count into the row."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [python, "-m", "pytest", f"tests/{suite}", "-n", workers, "-p", "no:cacheprovider"]
        subprocess.run([*command, f"--junitxml={report}", *options], cwd=ROOT, env=environment)
        row.add(suite, report)


def render(rows: list[Row]) -> str:
    """The table, then what failed and what was skipped."""
    lines = ["| torch | " + " | ".join(SUITES) + " | minutes |", "| --- |" + " --- |" * (len(SUITES) + 1)]
    for row in rows:
        cells = " | ".join(row.cells[suite] for suite in SUITES)
        lines.append(f"| {row.version} | {cells} | {row.minutes:.1f} |")
    failed = [f"- {row.version}: `{test}`" for row in rows for test in row.failed]
    if failed:
        lines += ["", "Failed:", "", *failed]
    skipped: dict[str, list[str]] = {}
    for row in rows:
        for reason, count in row.skipped.items():
            skipped.setdefault(reason, []).append(f"{row.version} ({count})")
    if skipped:
        lines += ["", "Skipped, and why:", ""]
        lines += [f"- {reason}: {', '.join(where)}" for reason, where in sorted(skipped.items())]
    return "\n".join(lines) + "\n"


def parse(page: str) -> dict[str, Row]:
    """The rows of a page that `render` wrote, by version."""
    rows: dict[str, Row] = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and cells[0] in VERSIONS:
            found = dict(zip(SUITES, cells[1:]))
            rows[cells[0]] = Row(version=cells[0], cells=found, minutes=float(cells[-1]))
        elif failed := re.fullmatch(r"- ([0-9.]+): `(.*)`", line):
            rows[failed[1]].failed.append(failed[2])
        elif skipped := re.fullmatch(r"- (.*): ((?:[0-9.]+ \(\d+\)(?:, )?)+)", line):
            for version, count in re.findall(r"([0-9.]+) \((\d+)\)", skipped[2]):
                rows[version].skipped[skipped[1]] += int(count)
    return rows


def write_page(rows: list[Row]) -> None:
    """Put the rows into the page, beside those of other versions."""
    known = parse(PAGE.read_text()) if PAGE.exists() else {}
    known |= {row.version: row for row in rows}
    PAGE.write_text(INTRO + render([known[version] for version in VERSIONS if version in known]))


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
                run_suite(python, suite, options.workers, options.pytest.split(), row)
        finally:
            if not kept:
                shutil.rmtree(folder)
        row.minutes = (time.monotonic() - start) / 60
        rows.append(row)
        print(render(rows), flush=True)
        if not options.pytest:
            write_page([row])
    return 0 if all(row.is_good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
