"""`verify`: whether a checkpoint is whole and undamaged, without loading it; all findings, not the first.

Owns the order of the checks and the threads. What a record is checked by is `record_check`'s, what names tell
`key_rules`'. Works on orlop's checkpoints and on any DCP directory; needs no torch; executes nothing; changes nothing.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from orlop.dcp.catalog import Catalog, Extent, TensorEntry
from orlop.dcp.contents import METADATA_NAME
from orlop.dcp.index import FileIndex
from orlop.errors import CheckpointError
from orlop.store.manifest import MANIFEST_NAME
from orlop.tools import param_groups
from orlop.tools.findings import Finding, as_error, from_error
from orlop.tools.key_rules import check_groups, check_names
from orlop.tools.leaf_names import optimizer_names
from orlop.tools.opened import Opened
from orlop.tools.record_check import Outcome, RecordJob, check_record
from orlop.tools.structure import check_files, check_indexed, check_structure
from orlop.wording import counted

if TYPE_CHECKING:
    from orlop.store.objects import Url

__all__ = ["CheckResult", "check_checkpoint", "require_sound", "verify"]

_SUFFIX = ".distcp"
_MOST_THREADS = 8

_T = TypeVar("_T")


@dataclass(slots=True, kw_only=True)
class CheckResult:
    """What `check_checkpoint` found.

    Attributes:
        path: The checkpoint.
        findings: In the order of the checks.
        num_leaves: That the metadata names.
        num_records: That were read.
        bytes_read: Of data files.
        bytes_checked: Of these, those that a checksum covers.
        seconds: Wall time.
    """

    path: Path | Url
    findings: list[Finding] = field(default_factory=list)
    num_leaves: int = 0
    num_records: int = 0
    bytes_read: int = 0
    bytes_checked: int = 0
    seconds: float = 0.0

    @property
    def is_sound(self) -> bool:
        """Whether nothing counts against the checkpoint."""
        return not any(finding.is_fault for finding in self.findings)


def verify(path: str | os.PathLike[str]) -> list[Finding]:
    """Check a checkpoint without loading it.

    Args:
        path: orlop's own, or any DCP directory.

    Returns:
        All findings; a checkpoint is sound when none of them `is_fault`.

    Raises:
        CheckpointNotFound: Nothing is there.
    """
    return check_checkpoint(path).findings


def require_sound(path: str | os.PathLike[str]) -> None:
    """Check a checkpoint without loading it.

    Raises:
        CheckpointNotFound: Nothing is there.
        CheckpointError: The first fault, as the type that a load would raise; it says how many more there are.
    """
    faults = [finding for finding in verify(path) if finding.is_fault]
    if faults:
        raise as_error(faults[0], len(faults) - 1)


def check_checkpoint(
    path: str | os.PathLike[str],
    *,
    num_threads: int | None = None,
    on_bytes: Callable[[int, int], None] | None = None,
) -> CheckResult:
    """As `verify`, with counts.

    Args:
        path: orlop's own, or any DCP directory.
        num_threads: How many threads read; by default as many as this process has CPUs, 8 at most.
        on_bytes: Told of progress: bytes read so far, bytes to read in all.

    Raises:
        CheckpointNotFound: Nothing is there.
    """
    began = time.perf_counter()
    opened = Opened(path)
    result = CheckResult(path=opened.location)
    manifest = _attempt(lambda: opened.manifest, MANIFEST_NAME, result.findings)
    if result.findings:
        opened.contents.ignore_manifest()
    if manifest is not None:
        result.findings += check_files(opened.sizes, manifest)
    catalog = _attempt(lambda: opened.catalog, METADATA_NAME, result.findings)
    indexes = _read_indexes(opened, catalog, result.findings)
    jobs = _jobs_of_indexes(indexes)
    if catalog is not None:
        result.num_leaves = len(catalog.leaves)
        result.findings += check_structure(catalog)
        result.findings += check_indexed(catalog, indexes)
        groups = _groups(opened)
        numbers = {(group.optimizer, param): group.index for group in groups for param in group.params}
        result.findings += check_names(catalog.leaves, optimizer_names(catalog.leaves), numbers, manifest)
        if manifest is not None:
            options = [(group.optimizer, group.index, group.options.keys()) for group in groups]
            result.findings += check_groups(options, manifest)
        jobs = _jobs_of(catalog, indexes)
    threads = num_threads or min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    _check_records(opened, jobs, indexes, threads, result, on_bytes)
    result.seconds = time.perf_counter() - began
    return result


def _attempt(read: Callable[[], _T], name: str, findings: list[Finding]) -> _T | None:
    """What `read` gives; where it fails, the finding is noted."""
    try:
        return read()
    except (CheckpointError, OSError) as error:
        findings.append(from_error(error, name))
        return None


def _groups(opened: Opened) -> list[param_groups.Group]:
    """The param groups; none where a group's record can't be read (its own check says so)."""
    try:
        return param_groups.groups(opened)
    except (CheckpointError, OSError):
        return []


# -- records -----------------------------------------------------------------------------------------------------------


def _read_indexes(
    opened: Opened, catalog: Catalog | None, findings: list[Finding]
) -> dict[str, FileIndex | None]:
    """The index of each data file; None where there is none, or none that can be read."""
    names = {name for name in opened.sizes if name.endswith(_SUFFIX)}
    if catalog is not None:
        names = {extent.path for extent in catalog.extents.values()}
    indexes: dict[str, FileIndex | None] = {}
    for name in sorted(names):
        indexes[name] = _attempt(lambda name=name: opened.contents.index(name), name, findings)  # type: ignore[misc]
    return indexes


def _jobs_of_indexes(indexes: dict[str, FileIndex | None]) -> list[RecordJob]:
    """What there is to check where the metadata can't be read."""
    return [
        RecordJob(
            leaf=record.leaf,
            extent=Extent(path=name, offset=record.record[0], nbytes=record.record[1]),
            box=record.box,
            dtype=record.dtype,
            indexed=record,
        )
        for name, index in indexes.items()
        if index is not None
        for record in index.records
    ]


def _jobs_of(catalog: Catalog, indexes: dict[str, FileIndex | None]) -> list[RecordJob]:
    """One job for each record; tied leaves share one."""
    jobs: dict[Extent, RecordJob] = {}
    boxes = {
        leaf: {box.offsets: box for box in entry.chunks}
        for leaf, entry in catalog.leaves.items()
        if entry is not None
    }
    for (leaf, offsets), extent in catalog.extents.items():
        if extent in jobs:
            jobs[extent].aliases.append(leaf)
            continue
        entry: TensorEntry | None = catalog.leaves.get(leaf)
        index = indexes.get(extent.path)
        jobs[extent] = RecordJob(
            leaf=leaf,
            extent=extent,
            box=boxes.get(leaf, {}).get(offsets) if offsets is not None else None,
            dtype=None if entry is None else entry.dtype,
            indexed=None if index is None else index.by_start.get(extent.offset),
            is_indexed_file=index is not None,
        )
    return sorted(jobs.values(), key=lambda job: (job.extent.path, job.extent.offset))


def _check_records(
    opened: Opened,
    jobs: list[RecordJob],
    indexes: dict[str, FileIndex | None],
    num_threads: int,
    result: CheckResult,
    on_bytes: Callable[[int, int], None] | None,
) -> None:
    by_file: defaultdict[str, list[RecordJob]] = defaultdict(list)
    for job in jobs:
        by_file[job.extent.path].append(job)
    total = sum(job.extent.nbytes for job in jobs)
    for path, file_jobs in by_file.items():
        index = indexes.get(path)
        try:
            with opened.open(path) as file, ThreadPoolExecutor(num_threads, "orlop-verify") as pool:
                if index is not None and file.size != index.nbytes and path not in _named(result.findings):
                    result.findings.append(_wrong_size(path, index.nbytes, file.size))
                for outcome in pool.map(lambda job: check_record(file, job), file_jobs):
                    _add(outcome, result)
                    if on_bytes is not None:
                        on_bytes(result.bytes_read, total)
        except (CheckpointError, OSError) as error:
            if path not in _named(result.findings):
                result.findings.append(from_error(error, path))


def _named(findings: list[Finding]) -> set[str]:
    return {finding.where for finding in findings if finding.is_fault}


def _wrong_size(path: str, expected: int, found: int) -> Finding:
    return Finding(
        kind="corrupt",
        where=path,
        what="a data file has not the size that was written",
        expected=counted(expected, "byte"),
        found=counted(found, "byte"),
    )


def _add(outcome: Outcome, result: CheckResult) -> None:
    result.findings += outcome.findings
    result.num_records += 1
    result.bytes_read += outcome.bytes_read
    result.bytes_checked += outcome.bytes_checked
