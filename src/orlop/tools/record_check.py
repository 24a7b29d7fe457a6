"""One stored record checked: by orlop's index where there is one, and by the record's own CRC-32s.

Owns which bytes of a record are compared with what. Every byte passes by once. Must not know torch, other records, nor
how records are shared out to threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from orlop.dcp.archive import Member, Unusual, locate_tensor, raw_at, read_directory
from orlop.dcp.boxes import Box
from orlop.dcp.catalog import Extent
from orlop.dcp.checksums import BLOCK_BYTES, BlockCrcs, crc32
from orlop.dcp.index import IndexRecord
from orlop.dcp.inflated import inflated
from orlop.dcp.record import Frame
from orlop.errors import CheckpointCorrupt, CheckpointError
from orlop.store.directory import RangedData
from orlop.tools.findings import Finding, from_error
from orlop.tools.frame_check import is_frame_as_written, own_frame, require_header
from orlop.tools.plain_records import unsafe_names
from orlop.wording import counted

__all__ = ["Outcome", "RecordJob", "check_record"]

# Stays in the cache between reading and summing; whole blocks.
_STEP_BYTES = 16 * BLOCK_BYTES
_SMALL_RECORD = 64 * 1024
_MOST_PLAIN_BYTES = 256 << 20

ReadAt = Callable[[int, int], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordJob:
    """What to check.

    Attributes:
        leaf: Whose record.
        extent: Where it stands.
        box: The part of the leaf; None for plain data.
        dtype: By the metadata; None for plain data.
        indexed: The index's record there, if it has one.
        is_indexed_file: Whether the file has an index.
        aliases: Other leaves in the same place.
    """

    leaf: str
    extent: Extent
    box: Box | None
    dtype: str | None
    indexed: IndexRecord | None
    is_indexed_file: bool = False
    aliases: list[str] = field(default_factory=list)

    @property
    def where(self) -> str:
        """For messages."""
        return f"{self.leaf} in {self.extent.path}"


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What was found in one record, and how many of its bytes were read and compared with a checksum."""

    findings: list[Finding] = field(default_factory=list)
    bytes_read: int = 0
    bytes_checked: int = 0


def check_record(file: RangedData, job: RecordJob) -> Outcome:
    """Read one record whole and check all that can be checked of it."""
    outcome = Outcome()
    extent = job.extent
    try:
        if extent.offset + extent.nbytes > file.size:
            raise CheckpointCorrupt(
                "a file is too short for what it should hold",
                where=job.where,
                expected="at least " + counted(extent.offset + extent.nbytes, "byte"),
                found=counted(file.size, "byte"),
            )
        outcome.findings += _check_index_entry(job)
        _check_content(file, job, outcome)
    except (CheckpointError, OSError) as error:
        outcome.findings.append(from_error(error, job.where))
    outcome.bytes_read = max(outcome.bytes_read, outcome.bytes_checked)
    return outcome


def _check_index_entry(job: RecordJob) -> list[Finding]:
    """Index and metadata say the same of this record."""
    if not job.is_indexed_file:
        return []
    record, extent = job.indexed, job.extent
    if record is None or record.record[1] != extent.nbytes or record.leaf not in (job.leaf, *job.aliases):
        found = (
            "no such record" if record is None else f"{counted(record.record[1], 'byte')} of {record.leaf}"
        )
        expected = f"{counted(extent.nbytes, 'byte')} at {extent.offset}"
    elif record.dtype is not None and (record.dtype, record.box) != (job.dtype, job.box):
        expected, found = f"{job.dtype} {job.box}", f"{record.dtype} {record.box}"
    else:
        return []
    what = "index and metadata contradict each other"
    return [Finding(kind="corrupt", where=job.where, what=what, expected=expected, found=found)]


def _check_content(file: RangedData, job: RecordJob, outcome: Outcome) -> None:
    extent, record = job.extent, job.indexed
    read: ReadAt = partial(_read_at, file, extent)
    if job.dtype is None and job.box is None and extent.nbytes <= _MOST_PLAIN_BYTES and not extent.transforms:
        _check_plain(read(0, extent.nbytes), job, outcome)
        return
    if record is not None and record.dtype is None:
        # The index covers the record whole, frame and all.
        _check_blocks(file, job, record, outcome)
        return
    if extent.transforms:
        _note_unchecked(job, f"its bytes were transformed: {', '.join(extent.transforms)}", outcome)
        outcome.bytes_read = extent.nbytes
        return
    if extent.nbytes <= _SMALL_RECORD:
        read = partial(_slice, read(0, extent.nbytes))
    _check_members(file, job, read, outcome)


def _check_plain(content: bytes, job: RecordJob, outcome: Outcome) -> None:
    """A byte leaf: its checksums, and whether it is data."""
    if job.indexed is not None and job.indexed.data == job.indexed.record:
        blocks = BlockCrcs()
        blocks.add(memoryview(content))
        _require_blocks(blocks, job, job.indexed)
        outcome.bytes_checked += len(content)
    else:
        _check_members(None, job, partial(_slice, content), outcome)
    foreign = unsafe_names(content, job.where)
    if foreign:
        outcome.findings.append(
            Finding(
                kind="unsafe",
                where=job.where,
                what="a record holds more than plain data; nothing of it was executed",
                found=", ".join(foreign),
                todo="a load refuses it unless that class is allowed with torch.serialization.add_safe_globals",
            )
        )


def _check_members(file: RangedData | None, job: RecordJob, read: ReadAt, outcome: Outcome) -> None:
    """Every file inside the record by its own CRC-32, and a tensor's bytes by the index as well, in the same pass.

    A record of orlop's own is compared whole, and looked into only to say what is wrong with it.
    """
    nbytes, where = job.extent.nbytes, job.where
    frame, reason = own_frame(job.indexed), None
    if frame is not None and _is_own_sound(file, job, frame, read):
        outcome.bytes_checked += nbytes
        return
    try:
        members = read_directory(read, nbytes, where)
        for name, member in members.items():
            at = raw_at(read, member, name, nbytes, where)
            require_header(read, member, name, at, where)
            if not member.is_stored:
                _check_compressed(read(at, member.stored_bytes), member, name, job, outcome)
                continue
            blocks = _summed(file, job, read, at, member.nbytes)
            outcome.bytes_read += member.nbytes
            record = job.indexed
            by_index = record is not None and record.data == (job.extent.offset + at, member.nbytes)
            if by_index and record is not None:
                _require_blocks(blocks, job, record)
            if member.crc and blocks.total() != member.crc:
                raise CheckpointCorrupt(
                    "a checksum differs: the file was damaged after it was written", where=f"{where}: {name}"
                )
            if member.crc or by_index or not member.nbytes:
                outcome.bytes_checked += member.nbytes
            else:
                reason = "its record carries no checksum"
        _check_description(job, read)
    except Unusual as unusual:
        reason = str(unusual)
    if frame is not None:
        raise CheckpointCorrupt("a record is not as orlop wrote it: it was damaged after that", where=where)
    if reason is not None:
        _note_unchecked(job, reason, outcome)


def _is_own_sound(file: RangedData | None, job: RecordJob, frame: Frame, read: ReadAt) -> bool:
    assert job.indexed is not None
    blocks = _summed(file, job, read, len(frame.head), frame.nbytes)
    _require_blocks(blocks, job, job.indexed)
    return is_frame_as_written(read, frame, blocks.total())


def _check_compressed(content: bytes, member: Member, name: str, job: RecordJob, outcome: Outcome) -> None:
    """A file that unfolds to what its checksum says, and to no more than a load would take."""
    unfolded = inflated(content, member, job.extent.nbytes)
    if len(unfolded) != member.nbytes or (member.crc and crc32(unfolded) != member.crc):
        raise CheckpointCorrupt(
            "a compressed file in a record does not unfold to what it should hold",
            where=f"{job.where}: {name}",
            expected=f"{counted(member.nbytes, 'byte')} from {member.stored_bytes:,}",
        )
    outcome.bytes_read += member.stored_bytes
    outcome.bytes_checked += member.stored_bytes


def _check_description(job: RecordJob, read: ReadAt) -> None:
    """The record says of its tensor what the metadata says."""
    if job.box is None or job.dtype is None:
        return
    try:
        found = locate_tensor(read, job.extent.nbytes, job.where)
    except Unusual:
        return  # strides, several storages: torch's own loader reads it, and its bytes are checked
    if (found.dtype, found.sizes) != (job.dtype, job.box.sizes):
        raise CheckpointCorrupt(
            "a record is not what the metadata says",
            where=job.where,
            expected=f"{job.dtype} {job.box.sizes}",
            found=f"{found.dtype} {found.sizes}",
        )


def _check_blocks(file: RangedData, job: RecordJob, record: IndexRecord, outcome: Outcome) -> None:
    blocks = BlockCrcs()
    _stream(file, record.data[0], record.data[1], blocks, job.where)
    _require_blocks(blocks, job, record)
    outcome.bytes_checked += record.data[1]


def _require_blocks(blocks: BlockCrcs, job: RecordJob, record: IndexRecord) -> None:
    found, expected = blocks.crcs(), record.crcs()
    if len(found) == len(expected) and all(a == b for a, b in zip(found, expected)):
        return
    wrong = [number for number, (a, b) in enumerate(zip(found, expected)) if a != b]
    first = record.data[0] + wrong[0] * BLOCK_BYTES if wrong else record.data[0]
    raise CheckpointCorrupt(
        "a checksum differs: the file was damaged after it was written",
        where=job.where,
        found=f"{len(wrong)} of {counted(len(expected), 'block')} of {BLOCK_BYTES // 1024} KiB, "
        f"the first at byte {first:,}",
    )


def _note_unchecked(job: RecordJob, reason: str, outcome: Outcome) -> None:
    outcome.findings.append(Finding(kind="unchecked", where=job.where, what=reason))


# -- bytes -------------------------------------------------------------------------------------------------------------


def _summed(file: RangedData | None, job: RecordJob, read: ReadAt, at: int, nbytes: int) -> BlockCrcs:
    blocks = BlockCrcs()
    if file is None or job.extent.nbytes <= _SMALL_RECORD:
        blocks.add(memoryview(read(at, nbytes)))
    else:
        _stream(file, job.extent.offset + at, nbytes, blocks, job.where)
    return blocks


def _stream(file: RangedData, start: int, nbytes: int, blocks: BlockCrcs, where: str) -> None:
    room = memoryview(bytearray(min(_STEP_BYTES, max(nbytes, 1))))
    done = 0
    while done < nbytes:
        part = room[: min(len(room), nbytes - done)]
        count = file.read_into(start + done, [part])
        if count != len(part):
            raise CheckpointCorrupt("a file ends early", where=where)
        blocks.add(part)
        done += count


def _read_at(file: RangedData, extent: Extent, offset: int, nbytes: int) -> bytes:
    return file.read(extent.offset + offset, max(0, min(nbytes, extent.nbytes - offset)))


def _slice(content: bytes, offset: int, nbytes: int) -> bytes:
    return content[offset : offset + nbytes]
