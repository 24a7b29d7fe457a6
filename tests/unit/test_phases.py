"""phases: seconds, host peaks, nesting, the log line."""

from __future__ import annotations

import logging
import mmap
import time
from pathlib import Path

import pytest
import torch

import orlop.phases as phases
from orlop.phases import phase

MIB = 2**20
needs_proc = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")


def _touch(mib: int) -> None:
    # Pages of its own, given back at once: only a peak counter sees them, and no allocator had them before.
    torch.frombuffer(mmap.mmap(-1, mib * MIB), dtype=torch.uint8).fill_(1)


def test_seconds_are_the_blocks() -> None:
    with phase("nap") as nap:
        time.sleep(0.05)
        assert nap.seconds == 0.0
    assert 0.05 <= nap.seconds < 5.0


@needs_proc
def test_peak_is_of_this_block_alone() -> None:
    _touch(200)
    with phase("small") as small:
        _touch(40)
    assert small.host_peak_exact
    assert 30 * MIB <= small.host_peak - small.host_before <= 120 * MIB


@needs_proc
def test_an_inner_phase_does_not_hide_the_outer_peak() -> None:
    with phase("outer") as outer:
        _touch(120)
        with phase("inner") as inner:
            _touch(20)
    assert outer.host_peak - outer.host_before >= 100 * MIB
    assert inner.host_peak - inner.host_before <= 80 * MIB


@needs_proc
def test_the_outer_peak_includes_the_inner() -> None:
    with phase("outer") as outer, phase("inner"):
        _touch(120)
    assert outer.host_peak - outer.host_before >= 100 * MIB


def test_a_counter_that_cannot_be_reset_is_said_to_be_an_upper_bound(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(phases, "_CLEAR_REFS", tmp_path / "no" / "such" / "file")
    _touch(50)
    with phase("quiet") as quiet:
        pass
    assert quiet.host_peak >= quiet.host_before > 0
    if not quiet.host_peak_exact:
        assert "at most" in str(quiet)


def test_without_proc_getrusage_serves(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(phases, "_CLEAR_REFS", tmp_path / "gone")
    monkeypatch.setattr(phases, "_STATUS", tmp_path / "gone")
    with phase("elsewhere") as elsewhere:
        pass
    assert elsewhere.host_peak >= elsewhere.host_before > 0


def test_one_line_at_info(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="orlop"), phase("save"):
        pass
    (record,) = caplog.records
    assert record.name == "orlop"
    assert record.getMessage().startswith("save: ")
    assert "host" in record.getMessage()
    assert "peak" in record.getMessage()


def test_a_failing_block_is_measured_and_its_error_passes(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, logger="orlop"),
        pytest.raises(ValueError, match="broken"),
        phase("load") as load,
    ):
        raise ValueError("broken")
    assert load.seconds > 0
    assert [r.getMessage().split(":")[0] for r in caplog.records] == ["load failed"]
    assert phases._open == []


def test_other_ranks_are_silent(monkeypatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(phases.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(phases.dist, "get_rank", lambda: 1)
    with caplog.at_level(logging.INFO, logger="orlop"), phase("save"):
        pass
    assert caplog.records == []
