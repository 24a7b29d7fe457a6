"""store/metrics: exact bits in the lines; a rewind leaves every step once."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from orlop.store import files
from orlop.store.metrics import MetricsLog, StepRecord


def _record(step: int, loss: float = 0.1) -> StepRecord:
    return StepRecord(
        step=step,
        loss=loss,
        grad_norm=1 / 3,
        lr=[1e-3, 0.1 + 0.2],
        tokens=step * 8,
        seconds=0.5,
        skipped=False,
    )


def _steps(log: MetricsLog) -> list[int]:
    return [json.loads(line)["step"] for line in log.path.read_text().splitlines()]


@pytest.fixture
def log(tmp_path: Path) -> MetricsLog:
    log = MetricsLog(tmp_path / "run" / "metrics.jsonl")
    log.rewind(0)
    for step in range(1, 6):
        log.append(_record(step))
    return log


@pytest.mark.parametrize("loss", [0.1, 1e-45, 5.551115123125783e-17, math.inf, 2.3025850929940455, -0.0])
def test_floats_come_back_bit_for_bit(tmp_path: Path, loss: float) -> None:
    log = MetricsLog(tmp_path / "m.jsonl")
    log.append(_record(1, loss))
    found = json.loads(log.path.read_text())
    assert found["loss"].hex() == loss.hex()
    assert found["lr"][1].hex() == (0.1 + 0.2).hex()


def test_nan_is_written(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "m.jsonl")
    log.append(_record(1, math.nan))
    assert math.isnan(json.loads(log.path.read_text())["loss"])


def test_a_rewind_drops_later_steps(log: MetricsLog) -> None:
    log.rewind(3)
    assert _steps(log) == [1, 2, 3]
    log.append(_record(4))
    assert _steps(log) == [1, 2, 3, 4]


def test_a_rewind_to_the_start_drops_all(log: MetricsLog) -> None:
    log.rewind(0)
    assert log.path.read_bytes() == b""


@pytest.mark.parametrize(
    "tail", [b'{"step": 6, "lo', b'{"step": 6}', b"\0\0\0\0\n", b"{}\n", b'{"step": null}\n']
)
def test_a_torn_tail_is_dropped(log: MetricsLog, tail: bytes) -> None:
    files.append_file(log.path, tail)
    log.rewind(5)
    assert _steps(log) == [1, 2, 3, 4, 5]


def test_a_rewind_with_nothing_to_drop_touches_nothing(log: MetricsLog) -> None:
    seen: list[files.Operation] = []
    with files.observed(seen.append):
        log.rewind(5)
    assert seen == []


def test_a_crash_in_a_rewind_leaves_the_old_file(log: MetricsLog) -> None:
    def crash(operation: files.Operation) -> None:
        if operation.kind == "rename":
            raise OSError("power cut")

    with files.observed(crash), pytest.raises(OSError, match="power cut"):
        log.rewind(2)
    assert _steps(log) == [1, 2, 3, 4, 5]


def test_make_durable_syncs_the_file_and_its_name(log: MetricsLog) -> None:
    seen: list[tuple[str, Path]] = []
    with files.observed(lambda operation: seen.append((operation.kind, operation.path))):
        log.make_durable()
    assert seen == [("fsync", log.path), ("fsync", log.path.parent)]


def test_no_file_is_no_error(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "new" / "m.jsonl")
    log.make_durable()
    log.rewind(7)
    assert not log.path.exists()
