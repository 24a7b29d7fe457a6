"""The threads that do a load's jobs, in the order of files and bytes.

Owns the queue of jobs, the open files, and the report of what was read. How a job's bytes travel is `fetch`'s. Must not
know plans, planners or metadata.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from orlop.dcp.collector import without_collection
from orlop.dcp.fetch import Fetch, Job, Scratch, Tally, check_whole, jobs_of, run_job
from orlop.store.directory import RangedData

__all__ = ["MOST_THREADS", "Fetch", "ReadReport", "run_fetches"]

# Each has a scratch buffer of 4 MiB: all of them together less than 64 MiB.
MOST_THREADS = 12


@dataclass(slots=True, kw_only=True)
class ReadReport:
    """What a reader has read on this rank since it was made or reset, in bytes.

    Attributes:
        bytes_needed: Stored bytes of the wanted regions.
        bytes_read: Bytes fetched for them, with what was read over or only to check.
        bytes_checked: Of the needed ones, those compared with a checksum.
        unchecked: Leaves that could not be (fully) checked, each with the reason.
        fallbacks: Leaves that torch's own safe loader read, each with the reason.
    """

    bytes_needed: int = 0
    bytes_read: int = 0
    bytes_checked: int = 0
    unchecked: dict[str, str] = field(default_factory=dict)
    fallbacks: dict[str, str] = field(default_factory=dict)


class _Queue:
    """The jobs in the order of files and bytes, handed out one by one; the files are opened and closed by it."""

    def __init__(self, jobs: list[Job], open_file: Callable[[str], RangedData]) -> None:
        self._jobs = iter(jobs)
        self._open_file = open_file
        self._left = Counter(job.fetch.source.path for job in jobs)
        self._wanted: Counter[str] = Counter()
        for job in jobs:
            self._wanted[job.fetch.source.path] += job.piece.stop - job.piece.start
        self._files: dict[str, RangedData] = {}
        self._lock = threading.Lock()
        self.failure: BaseException | None = None

    def take(self) -> tuple[Job, RangedData] | None:
        """The next job; None when there is none, or one has failed."""
        with self._lock:
            job = next(self._jobs, None) if self.failure is None else None
            if job is None:
                return None
            path = job.fetch.source.path
            if path not in self._files:
                self._files[path] = file = self._open_file(path)
                if 2 * self._wanted[path] > file.size:
                    file.expect_all()
            return job, self._files[path]

    def done(self, job: Job) -> None:
        """A job is finished; the last one of a file closes it."""
        path = job.fetch.source.path
        with self._lock:
            self._left[path] -= 1
            if not self._left[path]:
                self._files.pop(path).close()

    def close(self) -> None:
        """Close what a failure left open."""
        for file in self._files.values():
            file.close()


def _work(queue: _Queue, pinned: bool, tally: Tally) -> None:
    scratch = Scratch(pinned)
    try:
        while (taken := queue.take()) is not None:
            job, file = taken
            run_job(job, file, scratch, tally)
            queue.done(job)
    except BaseException as error:
        queue.failure = queue.failure or error


def run_fetches(
    fetches: list[Fetch], open_file: Callable[[str], RangedData], threads: int, report: ReadReport
) -> None:
    """Do all fetches; every target is filled and every checksum compared when this returns.

    Args:
        fetches: What to do.
        open_file: Opens a data file by its name in the checkpoint.
        threads: How many threads work; the caller is one of them.
        report: What was read and checked is added to it.

    Raises:
        CheckpointCorrupt: A checksum differs or a file ends early.
        CheckpointIncomplete: A file is missing.
        OSError: As the system raised it.
    """
    ordered = sorted(fetches, key=lambda fetch: (fetch.source.path, fetch.source.at))
    with without_collection():
        jobs = [job for fetch in ordered for job in jobs_of(fetch)]
    pinned = any(fetch.target.device.type not in ("cpu", "meta") for fetch in fetches)
    queue = _Queue(jobs, open_file)
    tallies = [Tally() for _ in range(min(threads, MOST_THREADS, max(1, len(jobs))))]
    _run_threads(queue, pinned, tallies)
    for fetch in fetches:
        check_whole(fetch)
        report.bytes_needed += fetch.nbytes
        if (reason := fetch.unchecked) is not None:
            report.unchecked[fetch.source.leaf] = reason
    report.bytes_read += sum(tally.read for tally in tallies)
    report.bytes_checked += sum(tally.checked for tally in tallies)


def _run_threads(queue: _Queue, pinned: bool, tallies: list[Tally]) -> None:
    workers = [
        threading.Thread(target=_work, args=(queue, pinned, tally), name="orlop-read")
        for tally in tallies[1:]
    ]
    try:
        for worker in workers:
            worker.start()
        _work(queue, pinned, tallies[0])
    except BaseException as error:
        queue.failure = error
        raise
    finally:
        for worker in workers:
            if worker.ident is not None:
                worker.join()
        queue.close()
    if queue.failure is not None:
        raise queue.failure
