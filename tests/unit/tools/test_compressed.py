"""Compressed files inside records, which torch never writes and others may: checked, bounded, never executed."""

import tracemalloc
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.rewriting import compress
from tests.unit.tools.test_check import Trap, faults

import orlop
from orlop.errors import CheckpointCorrupt, CheckpointUnsafe
from orlop.tools.check import check_checkpoint
from orlop.tools.convert import convert
from orlop.tools.plain_records import read_plain


@pytest.fixture(params=[torch.arange(100_000.0), (1, {"x": 2.5}, "text" * 1000)], ids=["tensor", "data"])
def saved(request, tmp_path):
    path = tmp_path / "x"
    dcp.save({"w": request.param}, checkpoint_id=path)
    return path


def test_a_sound_one_is_sound_and_wholly_checked(saved, tmp_path):
    convert(saved, tmp_path / "before", to="dcp")
    compress(saved)
    result = check_checkpoint(saved)
    assert result.findings == []
    assert result.bytes_checked == result.bytes_read > 0
    assert orlop.diff(saved, tmp_path / "before", exact=True) == []


def test_c10_a_flipped_bit_is_found(saved):
    compress(saved)
    data = saved / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    with zipfile.ZipFile(data) as archive:
        largest = max(archive.infolist(), key=lambda info: info.compress_size)
    content[largest.header_offset + 30 + len(largest.filename) + largest.compress_size // 2] ^= 0x10
    data.write_bytes(content)
    (found,) = faults(saved)
    assert (found.kind, "w in __0_0.distcp" in found.where) == ("corrupt", True)


def test_a_bomb_is_named_and_takes_no_memory(saved, tmp_path):
    compress(
        saved, lambda name, content: bytes(1 << 28) if name.endswith(("data/0", "data.pkl")) else content
    )
    tracemalloc.start()
    (found,) = faults(saved)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (found.kind, "unfold" in found.what) == ("corrupt", True)
    assert peak < 32 << 20
    with pytest.raises(CheckpointCorrupt, match=r"unfold|checksum"):
        convert(saved, tmp_path / "out", to="torch")
    assert not (tmp_path / "out").exists()


def test_f04_a_hostile_one_is_named_and_not_executed(tmp_path):
    path = tmp_path / "x"
    dcp.save({"w": Trap(str(tmp_path / "marker"))}, checkpoint_id=path)
    compress(path)
    (found,) = faults(path)
    assert (found.kind, found.found) == ("unsafe", "posix.mkdir")
    with pytest.raises(CheckpointUnsafe, match="mkdir"):
        read_plain((path / "__0_0.distcp").read_bytes(), "w")
    with pytest.raises(CheckpointUnsafe, match="mkdir"):
        convert(path, tmp_path / "out", to="torch")
    assert [each.name for each in tmp_path.iterdir()] == ["x"]
