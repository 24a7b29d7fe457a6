"""How much memory this host can still give.

Owns: reading free memory and cgroup limits, and the refusal before an allocation that would end in the OOM
killer. Must not know: what the memory is for. Reads Linux's ``/proc`` and ``/sys``; elsewhere nothing is
known and nothing refused."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from orlop.errors import HostMemoryError
from orlop.wording import counted

logger = logging.getLogger("orlop")

_UNLIMITED = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """What is left on this host.

    Attributes:
        available_bytes: What the kernel says can be allocated without swapping; None where that is not known.
        cgroup_bytes: What is left under the tightest memory limit of this process's control groups; None
            without one.
    """

    available_bytes: int | None
    cgroup_bytes: int | None

    @property
    def free_bytes(self) -> int | None:
        """The smaller of the two, or None where nothing is known."""
        known = [value for value in (self.available_bytes, self.cgroup_bytes) if value is not None]
        return min(known) if known else None


def read_host_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> HostMemory:
    """Read free memory and cgroup limits as they are now."""
    return HostMemory(
        available_bytes=_mem_available(proc / "meminfo"), cgroup_bytes=_cgroup_left(proc, cgroups)
    )


def local_world_size() -> int:
    """How many ranks run on this host: what torchrun says (``LOCAL_WORLD_SIZE``), else 1."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, int(text)) if text.isdigit() else 1


def locked_memory_limit() -> int | None:
    """This process's limit for locked memory, in bytes; None without one."""
    import resource  # Unix only

    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if limit == resource.RLIM_INFINITY else limit


def warn_of_locked_memory(nbytes: int) -> None:
    """Log a warning where `nbytes` are over the limit for locked memory.

    Not a refusal: drivers that lock pages themselves are not bound by it. Where the lock then fails, that is an error.
    """
    limit = locked_memory_limit()
    if limit is not None and nbytes > limit:
        logger.warning(
            "the ranks of this host will page-lock %s bytes, over this process's limit for locked memory of %s bytes "
            "(ulimit -l): should that fail, raise the limit",
            f"{nbytes:,}",
            f"{limit:,}",
        )


def require_host_memory(nbytes: int, num_local_ranks: int, memory: HostMemory) -> None:
    """Refuse `nbytes` for each of `num_local_ranks` where the host can't give them all.

    Raises:
        HostMemoryError: Says the need per rank and per host, and what is free.
    """
    free = memory.free_bytes
    if free is None or nbytes * num_local_ranks <= free:
        return
    raise HostMemoryError(
        "the optimizer state does not fit into this host's memory; nothing was allocated",
        where=counted(num_local_ranks, "rank") + " on this host",
        expected=f"{_gib(nbytes)} per rank, {_gib(nbytes * num_local_ranks)} for the host",
        found=f"{_gib(free)} free (available {_gib(memory.available_bytes)}, cgroup {_gib(memory.cgroup_bytes)})",
        todo="shard over more hosts, run fewer ranks per host, or raise the container's memory limit",
    )


def _gib(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else f"{nbytes / 2**30:.2f} GiB of host memory"


def _mem_available(meminfo: Path) -> int | None:
    for line in _read(meminfo).splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return None


def _cgroup_left(proc: Path, root: Path) -> int | None:
    """The least that is left between this process's group and the root, in either cgroup version."""
    left: list[int] = []
    for line in _read(proc / "self" / "cgroup").splitlines():
        _, controllers, path = ([*line.split(":", 2), "", ""])[:3]
        if controllers == "":
            names, base = ("memory.max", "memory.current"), root
        elif "memory" in controllers.split(","):
            names, base = ("memory.limit_in_bytes", "memory.usage_in_bytes"), root / "memory"
        else:
            continue
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            limit, usage = (_read(folder / name).strip() for name in names)
            if limit.isdigit() and usage.isdigit() and int(limit) < _UNLIMITED:
                left.append(max(0, int(limit) - int(usage) + _reclaimable(folder)))
            if folder == base:
                break
    return min(left) if left else None


def _reclaimable(folder: Path) -> int:
    """File pages that the kernel drops before it refuses: they count as used, yet they are free."""
    for line in _read(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
