"""Damage around the bytes of a record's files: all of it in orlop's records, what torch goes by in others."""

import io
import zipfile
from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.unit.tools.test_check import faults

from orlop.dcp import Writer
from orlop.dcp.boxes import Box
from orlop.dcp.catalog import Extent
from orlop.dcp.checksums import BlockCrcs, pack
from orlop.dcp.index import IndexRecord
from orlop.dcp.record import frame_tensor
from orlop.tools.record_check import RecordJob, check_record

TENSOR = torch.arange(5.0) + 1
BOX = Box((0,), (5,))
ENTRY, LOCATOR = b"PK\x01\x02", b"PK\x06\x07"


class Stored:
    """A data file with one record, in memory."""

    def __init__(self, content):
        self.content, self.size = content, len(content)

    def read(self, offset, nbytes):
        return self.content[offset : offset + nbytes]


def by_torch(value=TENSOR):
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue(), None


def by_orlop():
    raw = TENSOR.numpy().tobytes()
    frame, blocks = frame_tensor("float32", BOX.sizes, 0), BlockCrcs()
    blocks.add(memoryview(raw))
    content = frame.head + raw + frame.tail(blocks.total())
    data = (len(frame.head), len(raw))
    indexed = IndexRecord(
        leaf="w",
        dtype="float32",
        box=BOX,
        record=(0, len(content)),
        data=data,
        checksums=pack(blocks.crcs()),
    )
    return content, indexed


def is_sound(content, indexed):
    extent = Extent(path="__0_0.distcp", offset=0, nbytes=len(content))
    job = RecordJob(
        leaf="w",
        extent=extent,
        box=BOX,
        dtype="float32",
        indexed=indexed,
        is_indexed_file=indexed is not None,
    )
    findings = check_record(Stored(content), job).findings
    assert all("w in __0_0.distcp" in finding.where for finding in findings)
    return not any(finding.is_fault for finding in findings)


def flipped(content, places):
    for place in places:
        bad = bytearray(content)
        bad[place // 8] ^= 1 << place % 8
        yield place, bytes(bad)


def test_no_flipped_bit_of_orlops_record_is_missed():
    content, indexed = by_orlop()
    assert is_sound(content, indexed)
    assert [place for place, bad in flipped(content, range(8 * len(content))) if is_sound(bad, indexed)] == []


def test_no_flipped_bit_that_torch_stumbles_over_is_missed():
    content, _ = by_torch()
    assert is_sound(content, None)
    name_at = content.index(b"/data/0")
    header_at = content.rindex(b"PK\x03\x04", 0, name_at)
    entry_at = content.rindex(ENTRY, 0, content.rindex(b"/data/0"))
    end_at = content.index(b"PK\x06\x06")
    spans = (header_at, name_at + 12), (entry_at, content.index(ENTRY, entry_at + 4)), (end_at, len(content))
    harmless = 0
    for start, stop in spans:
        for place, bad in flipped(content, range(8 * start, 8 * stop)):
            if is_sound(bad, None):
                assert torch.equal(torch.load(io.BytesIO(bad), weights_only=True), TENSOR), divmod(place, 8)
                harmless += 1
    # Attributes, and who wrote it and who can read it: nothing that a loader goes by.
    assert 0 < harmless < 200


@pytest.mark.parametrize("writer", [Writer, None], ids=["orlop", "torch"])
@pytest.mark.parametrize(
    "header, byte, bit",
    [
        (ENTRY, 38, 0x10),
        (ENTRY, 8, 0x01),
        (ENTRY, 8, 0x20),
        (ENTRY, 9, 0x80),
        (ENTRY, 34, 0x01),
        (LOCATOR, 4, 0x01),
        (LOCATOR, 16, 0x01),
        (LOCATOR, 19, 0x80),
    ],
    ids=["folder", "encrypted", "patched", "unknown flag", "disk", "locator's disk", "no disks", "disks"],
)
def test_a_flip_that_no_checksum_covers_is_named(tmp_path, writer, header, byte, bit):
    path = tmp_path / "x"
    dcp.save({"w": TENSOR}, checkpoint_id=path, storage_writer=writer and writer(path))
    assert faults(path) == []
    data = path / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    before = content.rindex(b"/data/0") if header == ENTRY else len(content)
    content[content.rindex(header, 0, before) + byte] ^= bit
    data.write_bytes(content)
    (found,) = faults(path)
    assert (found.kind, "w in __0_0.distcp" in found.where) == ("corrupt", True)
    assert data.read_bytes() == content


def test_an_index_with_sizes_beyond_measure_is_no_crash():
    content, indexed = by_orlop()
    hostile = replace(
        indexed, box=Box((0, 0, 0), (0, 1 << 61, 1 << 61)), data=(indexed.data[0], 0), checksums=""
    )
    assert not is_sound(content, hostile)


@pytest.mark.parametrize("flag", [0x0001, 0x0020, 0x0040, 0x2000], ids=hex)
def test_a_flag_that_no_torch_record_has_is_refused(flag):
    """Encrypted, patched, hidden: torch refuses those as well, whatever the two headers say."""
    content = bytearray(by_torch()[0])
    for signature, place in ((b"PK\x03\x04", 6), (ENTRY, 8)):
        name_at = content.find(b"/data/0") if place == 6 else content.rfind(b"/data/0")
        at = content.rindex(signature, 0, name_at) + place
        content[at : at + 2] = (int.from_bytes(content[at : at + 2], "little") | flag).to_bytes(2, "little")
    assert not is_sound(bytes(content), None)


class Unseekable(io.BytesIO):
    """Makes `zipfile` write sums behind the files."""

    def seekable(self):
        return False

    def tell(self):
        raise OSError


@pytest.mark.parametrize("kind", [io.BytesIO, Unseekable])
@pytest.mark.parametrize("wide", [False, True], ids=["narrow", "wide"])
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED], ids=["stored", "deflated"])
def test_what_other_writers_write_is_sound(kind, wide, method):
    """Folders, dates, sums before or behind a file, sizes of 64 bits where 32 would do."""
    content, _ = by_torch()
    stream = kind()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(stream, "w", method) as new:
        folder = zipfile.ZipInfo("archive/", (2026, 1, 2, 3, 4, 6))
        folder.external_attr = 0o40755 << 16 | 0x10
        new.writestr(folder, b"")
        for name in old.namelist():
            with new.open(name, "w", force_zip64=wide) as target:
                target.write(old.read(name))
    assert torch.equal(torch.load(io.BytesIO(stream.getvalue()), weights_only=True), TENSOR)
    assert is_sound(stream.getvalue(), None)


def test_an_empty_tensor_by_torch_is_sound():
    """The one file of torch's whose sums do not follow it."""
    content, _ = by_torch(torch.empty(0))
    extent = Extent(path="x", offset=0, nbytes=len(content))
    job = RecordJob(leaf="w", extent=extent, box=Box((0,), (0,)), dtype="float32", indexed=None)
    assert check_record(Stored(content), job).findings == []
