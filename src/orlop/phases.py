"""Times a block and watches its memory: `with orlop.phase("save"): ...`.

Owns how seconds and bytes are measured and the one log line they end in. Must not know what the block does,
and needs no process group.
"""

from __future__ import annotations

import logging
import re
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist

_log = logging.getLogger("orlop")
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")

# Every phase that is under way. A peak counter is one per process: whoever resets it first notes its value
# here, so that an inner phase never hides what an outer one has seen.
_open: list[Phase] = []


@dataclass(slots=True, kw_only=True, eq=False)
class Phase:
    """What a phase took; filled in while it runs, final when its block has ended.

    Attributes:
        name: What the log line calls it.
        seconds: Wall time, 0 until the block ends.
        host_before: Resident bytes of this process when the block began.
        host_peak: Highest resident bytes while it ran.
        host_peak_exact: False where this system can't reset its peak counter and that counter did not rise:
            the peak is then only known to lie between `host_before` and `host_peak`, the highest ever.
        device_before: Allocated bytes of the accelerator when the block began; None without one in use.
        device_peak: Highest allocated bytes of the accelerator while it ran; None without one in use.
    """

    name: str
    seconds: float = 0.0
    host_before: int = 0
    host_peak: int = 0
    host_peak_exact: bool = True
    device_before: int | None = None
    device_peak: int | None = None
    _began: float = field(default=0.0, repr=False)
    _host_peak_at_start: int = field(default=0, repr=False)

    def __str__(self) -> str:
        about = "" if self.host_peak_exact else "at most "
        text = f"{self.seconds:.3f} s, host {_mib(self.host_before)}, peak {about}{_mib(self.host_peak)}"
        if self.device_before is not None and self.device_peak is not None:
            text += f", device {_mib(self.device_before)}, peak {_mib(self.device_peak)}"
        return text


@contextmanager
def phase(name: str) -> Iterator[Phase]:
    """Times the block, watches its memory, and logs one line at INFO on rank 0 (logger `orlop`).

    Phases nest. A block that raises is measured and logged too ("save failed: ..."). The kernel's peak of
    this process (Linux: `VmHWM`, which `ru_maxrss` follows) and the accelerator's are reset at the start.

    Args:
        name: What the line calls the block, e.g. `"save"`.

    Yields:
        The `Phase`, whose fields are final after the block.
    """
    measured = Phase(name=name)
    _begin(measured)
    failed = True
    try:
        yield measured
        failed = False
    finally:
        _end(measured)
        if is_rank_zero():
            _log.info("%s%s: %s", name, " failed" if failed else "", measured)


def _begin(measured: Phase) -> None:
    _note_peaks()
    exact = _reset_host_peak()
    device = _device_memory()
    if device is not None:
        device.reset_peak_memory_stats()
        measured.device_before = measured.device_peak = device.memory_allocated()
    measured.host_before = measured.host_peak = _resident_bytes()
    measured.host_peak_exact = exact
    measured._host_peak_at_start = 0 if exact else _host_peak_bytes()
    measured._began = time.perf_counter()
    _open.append(measured)


def _end(measured: Phase) -> None:
    measured.seconds = time.perf_counter() - measured._began
    _note_peaks()
    _open.remove(measured)


def _note_peaks() -> None:
    """Takes the peak counters' present values into every phase under way."""
    if not _open:
        return
    host = _host_peak_bytes()
    device = _device_memory()
    device_peak = device.max_memory_allocated() if device is not None else None
    for each in _open:
        each.host_peak = max(each.host_peak, host)
        # A counter that could not be reset, but rose since the start, is exact after all.
        each.host_peak_exact = each.host_peak_exact or host > each._host_peak_at_start
        if device_peak is not None:
            each.device_before = each.device_before or 0  # the accelerator came into use inside the block
            each.device_peak = max(each.device_peak or 0, device_peak)


def _resident_bytes() -> int:
    found = _status_bytes("VmRSS")
    return found if found is not None else _max_resident_bytes()


def _host_peak_bytes() -> int:
    found = _status_bytes("VmHWM")
    return found if found is not None else _max_resident_bytes()


def _status_bytes(field_name: str) -> int | None:
    try:
        text = _STATUS.read_text()
    except OSError:
        return None
    found = re.search(rf"^{field_name}:\s+(\d+) kB$", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _max_resident_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _reset_host_peak() -> bool:
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return False
    return True


def _device_memory() -> ModuleType | None:
    """The accelerator's memory counters, where one is in use; asking starts none."""
    if not torch.accelerator.is_available():
        return None
    module = torch.get_device_module(torch.accelerator.current_accelerator())
    names = ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats")
    if not all(hasattr(module, name) for name in names):
        return None
    started = getattr(module, "is_initialized", None)
    return module if started is None or started() else None


def is_rank_zero() -> bool:
    """Whether this process is the one that logs: rank 0, or the only one."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
