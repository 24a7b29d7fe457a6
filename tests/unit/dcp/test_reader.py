import gc
import io
import json
import pickle
import resource
import shutil
import threading
import time
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.rewriting import compress
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from orlop.dcp import Reader, Writer
from orlop.dcp.checksums import BLOCK_BYTES
from orlop.errors import CheckpointCorrupt, CheckpointIncomplete, CheckpointNotFound, CheckpointUnsafe

from .conftest import assert_equal, blank

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class OneLeaf(DefaultLoadPlanner):
    """Takes what the reader gives for some read items."""

    def __init__(self, target):
        super().__init__()
        self.target = target
        self.committed = []
        self.got = None

    def resolve_tensor(self, read_item):
        return self.target

    def commit_tensor(self, read_item, tensor):
        self.committed.append(read_item)

    def load_bytes(self, read_item, value):
        self.got = value.getvalue()


def read_box(reader, leaf, offsets, lengths, target):
    """Read one box of a leaf that is stored in one chunk."""
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    entry = metadata.state_dict_metadata[leaf]
    item = ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=MetadataIndex(leaf),
        dest_offsets=torch.Size([0] * len(offsets)),
        storage_index=MetadataIndex(leaf, entry.chunks[0].offsets),
        storage_offsets=torch.Size(offsets),
        lengths=torch.Size(lengths),
    )
    plan = reader.prepare_local_plan(LoadPlan([item]))
    planner = OneLeaf(target)
    reader.read_data(plan, planner)
    assert planner.committed == [item]
    return reader.report


def test_what_was_saved_comes_back_whoever_wrote_it(saved, state):
    path, _ = saved
    target = blank(state)
    places = {key: value.data_ptr() for key, value in target.items() if isinstance(value, torch.Tensor)}
    reader = Reader(path)
    dcp.load(target, storage_reader=reader)
    assert_equal(target, state)
    assert {k: v.data_ptr() for k, v in target.items() if isinstance(v, torch.Tensor)} == places
    report = reader.report
    assert report.bytes_read == report.bytes_needed
    assert report.bytes_checked == report.bytes_needed
    assert (report.unchecked, report.fallbacks) == ({}, {})


def test_metadata_is_what_torch_reads(saved):
    path, _ = saved
    theirs = FileSystemReader(path).read_metadata()
    ours = Reader(path).read_metadata()
    ours.storage_meta = theirs.storage_meta
    for entry in theirs.state_dict_metadata.values():
        if hasattr(entry, "properties"):
            entry.properties.pin_memory = False
            if hasattr(entry.properties, "strides"):  # torch 2.15; the records themselves tell
                entry.properties.strides = None
    assert ours == theirs


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shape", [(1000, 300), (10, 20, 50), (700_000,), (2, 1, 100_001)])
def test_any_box_into_any_target(tmp_path, shape, threads):
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    dcp.save({"w": whole}, storage_writer=Writer(tmp_path / "o"))
    dcp.save({"w": whole}, storage_writer=FileSystemWriter(tmp_path / "t"))
    generator = torch.Generator().manual_seed(len(shape))
    for _ in range(12):
        offsets, lengths = [], []
        for size in shape:
            offset = int(torch.randint(size, (), generator=generator))
            offsets.append(offset)
            lengths.append(int(torch.randint(1, size - offset + 1, (), generator=generator)))
        expected = whole[tuple(slice(o, o + n) for o, n in zip(offsets, lengths))]
        for folder in "ot":
            targets = {
                "contiguous": torch.full(lengths, -1.0),
                "strided": torch.full([*lengths, 2], -1.0)[..., 0],
                "wider": torch.full(lengths, -1.0, dtype=torch.float64),
            }
            for name, target in targets.items():
                report = read_box(
                    Reader(tmp_path / folder, num_threads=threads), "w", offsets, lengths, target
                )
                assert torch.equal(target, expected.to(target.dtype)), (folder, name, offsets, lengths)
                is_whole = lengths == list(shape)
                assert (report.bytes_checked == report.bytes_needed) == (folder == "o" or is_whole)
                assert bool(report.unchecked) == (folder == "t" and not is_whole)


def test_ranges_read_little_more_than_they_need(tmp_path):
    rows = torch.randn(2048, 2048)  # 16 MiB
    dcp.save({"w": rows}, storage_writer=Writer(tmp_path / "x"))
    needed = read = 0
    for rank in range(7):
        part = torch.empty(rows.tensor_split(7)[rank].shape)
        offset = sum(len(p) for p in rows.tensor_split(7)[:rank])
        report = read_box(Reader(tmp_path / "x"), "w", [offset, 0], part.shape, part)
        assert torch.equal(part, rows.tensor_split(7)[rank])
        needed, read = needed + report.bytes_needed, read + report.bytes_read
        assert report.bytes_read <= report.bytes_needed + 2 * BLOCK_BYTES
    assert read / needed <= 1.05


def test_the_system_reads_ahead_only_in_a_file_that_is_wanted_whole(tmp_path, monkeypatch):
    from orlop.store.files import RangedFile

    told, expect_all = [], RangedFile.expect_all
    monkeypatch.setattr(
        RangedFile, "expect_all", lambda file: told.append(file.path.name) or expect_all(file)
    )
    rows = torch.randn(2048, 512)
    dcp.save({"w": rows}, storage_writer=Writer(tmp_path / "x"))
    part = torch.empty(100, 512)
    read_box(Reader(tmp_path / "x"), "w", [7, 0], part.shape, part)
    assert torch.equal(part, rows[7:107])
    assert told == []
    whole = torch.empty(2048, 512)
    read_box(Reader(tmp_path / "x"), "w", [0, 0], whole.shape, whole)
    assert torch.equal(whole, rows)
    assert told == ["__0_0.distcp"]


def test_wide_rows_are_not_read_over(tmp_path):
    wide = torch.randn(8, 1 << 19)  # a row has 2 MiB
    dcp.save({"w": wide}, storage_writer=Writer(tmp_path / "x"))
    part = torch.empty(8, 1 << 17)
    report = read_box(Reader(tmp_path / "x"), "w", [0, 1 << 18], part.shape, part)
    assert torch.equal(part, wide[:, 1 << 18 : 3 << 17])
    assert report.bytes_read == report.bytes_needed


def test_a_leaf_saved_with_strides_is_not_read_as_row_major(tmp_path):
    turned = torch.arange(12.0).reshape(3, 4).t()
    dcp.save({"w": turned}, storage_writer=FileSystemWriter(tmp_path / "x"))
    target = {"w": torch.zeros(4, 3)}
    reader = Reader(tmp_path / "x")
    dcp.load(target, storage_reader=reader)
    assert torch.equal(target["w"], turned)
    assert "strides" in reader.report.fallbacks["w"]
    assert reader.report.bytes_checked == reader.report.bytes_needed


def test_compressed_records_fall_back_and_bombs_do_not_unfold(tmp_path):
    value = torch.arange(1000.0)
    path = tmp_path / "x"
    dcp.save({"w": value}, storage_writer=FileSystemWriter(path))
    compress(path)
    target = {"w": torch.zeros(1000)}
    reader = Reader(path)
    dcp.load(target, storage_reader=reader)
    assert torch.equal(target["w"], value)
    assert reader.report.fallbacks == {"w": "it is compressed"}
    assert reader.report.unchecked == {}

    compress(path, lambda name, content: bytes(1 << 26) if name.endswith("data/0") else content)
    with pytest.raises(CheckpointCorrupt, match=r"unfold|checksum"):
        read_box(Reader(path), "w", [0], [1000], torch.zeros(1000))


class Unfolding(io.RawIOBase):
    """Gives what zlib makes of a stream, a block at a time, as torch's own does with pyzstd."""

    def __init__(self, stream):
        self._rest = memoryview(zlib.decompress(stream.read()))

    def readable(self):
        return True

    def readinto(self, buffer):
        count = min(len(buffer), len(self._rest), 1000)
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


class Folding(io.BytesIO):
    def __init__(self, stream):
        super().__init__()
        self._stream = stream

    def close(self):
        self._stream.write(zlib.compress(self.getvalue()))
        self._stream.close()


@pytest.fixture
def zstandard(monkeypatch):
    """Torch's only extension, on zlib: its own packages need not be there."""
    extension = pytest.importorskip("torch.distributed.checkpoint._extension")
    compressor = SimpleNamespace(stream_writer=Folding)
    decompressor = SimpleNamespace(stream_reader=Unfolding)
    package = SimpleNamespace(ZstdCompressor=lambda: compressor, ZstdDecompressor=lambda: decompressor)
    monkeypatch.setattr(extension, "zstandard", package)
    return extension.ZStandard()


def test_r4_a_transformed_record_is_read_through_torchs_own_extension(tmp_path, zstandard):
    value = torch.arange(5000.0)
    writer = FileSystemWriter(tmp_path / "x", _extensions=[zstandard])
    dcp.save({"w": value, "plain": {"lr": 0.5}}, storage_writer=writer)
    reader, target = Reader(tmp_path / "x"), {"w": torch.zeros(5000), "plain": {"lr": None}}
    dcp.load(target, storage_reader=reader)
    assert torch.equal(target["w"], value)
    assert reader.report.fallbacks == {"w": "its bytes were transformed: stream.zstd/1"}
    assert (reader.report.unchecked, target["plain"]) == ({}, {"lr": 0.5})


@pytest.mark.parametrize("damage", ["no such extension", "other bytes", "unfolds to too much"])
def test_r4_transforms_that_cant_be_undone_are_corrupt(tmp_path, zstandard, monkeypatch, damage):
    path = tmp_path / "x"
    dcp.save({"w": torch.arange(5000.0)}, storage_writer=FileSystemWriter(path, _extensions=[zstandard]))
    data = path / "__0_0.distcp"
    if damage == "no such extension":
        content = (path / ".metadata").read_bytes()
        (path / ".metadata").write_bytes(content.replace(b"stream.zstd/1", b"stream.ztsd/1"))
    elif damage == "other bytes":
        data.write_bytes(bytes(data.stat().st_size))
    else:
        bomb = zlib.compress(bytes(4 << 20))
        assert len(bomb) <= data.stat().st_size
        data.write_bytes(bomb.ljust(data.stat().st_size, b"\0"))
        monkeypatch.setattr(zlib, "decompress", lambda data: zlib.decompressobj().decompress(data))
    target = {"w": torch.zeros(5000)}
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load(target, storage_reader=Reader(path))
    (cause,) = [failure[0] for failure in caught.value.failures.values()]
    assert isinstance(cause, CheckpointCorrupt)
    assert cause.where == f"w in {data}"
    assert torch.equal(target["w"], torch.zeros(5000))


def test_a_foreign_record_without_checksum_is_reported(tmp_path):
    dcp.save({"w": torch.arange(9.0)}, storage_writer=FileSystemWriter(tmp_path / "x"))
    data = tmp_path / "x" / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    entry = content.rindex(b"PK\x01\x02", 0, content.rindex(b"archive/data/0"))
    content[entry + 16 : entry + 20] = bytes(4)
    data.write_bytes(content)
    target = {"w": torch.zeros(9)}
    reader = Reader(tmp_path / "x")
    dcp.load(target, storage_reader=reader)
    assert torch.equal(target["w"], torch.arange(9.0))
    assert reader.report.unchecked == {"w": "its record carries no checksum"}
    assert reader.report.bytes_checked == 0


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_x01_c10_a_flipped_bit_in_a_tensor_is_named(saved, state, share):
    path, _ = saved
    where = {"large": state["large"]}
    data = next(p for p in path.glob("*.distcp") if state["large"].numpy().tobytes() in p.read_bytes())
    content = bytearray(data.read_bytes())
    start = content.index(state["large"].numpy().tobytes())
    content[start + int(share * state["large"].nbytes)] ^= 4
    data.write_bytes(content)
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load(blank(where), storage_reader=Reader(path))
    (cause,) = [failure[0] for failure in caught.value.failures.values()]
    assert isinstance(cause, CheckpointCorrupt)
    assert cause.where.startswith(f"large in {data}")


@pytest.mark.parametrize("kind", ["half", "almost", "empty", "hole", "gone"])
def test_c10_damaged_files_are_named_before_anything_changes(saved, state, kind):
    path, _ = saved
    for data in path.glob("*.distcp"):
        content = data.read_bytes()
        half = len(content) // 2
        new = {
            "half": content[:half],
            "almost": content[: int(0.999 * len(content))],
            "empty": b"",
            "hole": content[:half] + bytes(BLOCK_BYTES) + content[half + BLOCK_BYTES :],
        }
        data.unlink() if kind == "gone" else data.write_bytes(new[kind])
    target = blank(state)
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load(target, storage_reader=Reader(path))
    (cause,) = [failure[0] for failure in caught.value.failures.values()]
    assert isinstance(cause, CheckpointIncomplete if kind == "gone" else CheckpointCorrupt)
    assert "__0_" in cause.where
    if kind != "hole":
        assert_equal(target, blank(state))


def test_no_directory_no_metadata_and_half_metadata(tmp_path, state):
    with pytest.raises(CheckpointNotFound):
        Reader(tmp_path / "x").read_metadata()
    (tmp_path / "x").mkdir()
    with pytest.raises(CheckpointIncomplete, match=r"\.metadata is missing"):
        Reader(tmp_path / "x").read_metadata()
    (tmp_path / "x" / ".metadata").write_bytes(b"")
    with pytest.raises(CheckpointCorrupt, match="can't be read"):
        Reader(tmp_path / "x").read_metadata()


def test_a_region_that_no_file_holds_is_refused(tmp_path):
    path = tmp_path / "x"
    dcp.save({"w": torch.ones(4, 4), "other": torch.ones(2)}, storage_writer=FileSystemWriter(path))
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.state_dict_metadata["w"].chunks[0].sizes = torch.Size([3, 4])
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    target = {"w": torch.full((4, 4), 7.0)}
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load(target, storage_reader=Reader(path))
    (cause,) = [failure[0] for failure in caught.value.failures.values()]
    assert isinstance(cause, CheckpointIncomplete)
    assert "w in" in cause.where
    assert torch.equal(target["w"], torch.full((4, 4), 7.0))
    dcp.load({"other": torch.zeros(2)}, storage_reader=Reader(path))


@pytest.mark.parametrize("wanted", ["w", "other"])
def test_a_leaf_of_which_nothing_is_stored_is_refused(tmp_path, wanted):
    # One flipped bit can empty a list of chunks; the leaf then has no item in any plan, and torch fills nothing.
    path = tmp_path / "x"
    dcp.save({"w": torch.ones(4), "other": torch.ones(2)}, storage_writer=FileSystemWriter(path))
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.state_dict_metadata["w"].chunks.clear()
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    target = {wanted: torch.full((4 if wanted == "w" else 2,), 7.0)}
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load(target, storage_reader=Reader(path))
    (cause,) = [failure[0] for failure in caught.value.failures.values()]
    assert isinstance(cause, CheckpointIncomplete)
    assert cause.where == f"w in {path}"
    assert torch.equal(target[wanted], torch.full_like(target[wanted], 7.0))


class Evil:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (Path.touch, (Path(self.marker),))


def test_f04_nothing_of_metadata_is_executed(tmp_path):
    marker = tmp_path / "ran"
    path = tmp_path / "x"
    dcp.save({"w": torch.ones(2)}, storage_writer=FileSystemWriter(path))
    (path / ".metadata").write_bytes(pickle.dumps(Evil(str(marker))))
    with pytest.raises(CheckpointUnsafe, match=r"Path\.touch") as caught:
        Reader(path).read_metadata()
    assert caught.value.where == str(path / ".metadata")
    # Torch up to 2.10 looks for another metadata file after any failure, and hides the first one behind its own.
    with pytest.raises(dcp.CheckpointException, match=r"allow-list|metadata is (not )?None"):
        dcp.load({"w": torch.ones(2)}, storage_reader=Reader(path))
    assert not marker.exists()


@pytest.mark.parametrize("writer", [FileSystemWriter, Writer])
def test_f04_nothing_of_a_byte_leaf_is_executed_even_by_torchs_planner(tmp_path, writer):
    marker = tmp_path / "ran"
    path = tmp_path / "x"
    dcp.save({"w": Evil(str(marker))}, storage_writer=writer(path))
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load({"w": None}, storage_reader=Reader(path))
    (cause,) = [failure[0] for failure in caught.value.failures.values()]
    assert isinstance(cause, CheckpointUnsafe)
    assert "w in" in cause.where
    assert "pathlib.P" in cause.found
    assert not marker.exists()


class Allowed:
    def __init__(self, number):
        self.number = number


def test_classes_that_the_user_allowed_come_back(tmp_path):
    dcp.save({"w": Allowed(7)}, storage_writer=Writer(tmp_path / "x"))
    with pytest.raises(dcp.CheckpointException):
        dcp.load({"w": None}, storage_reader=Reader(tmp_path / "x"))
    target = {"w": None}
    with torch.serialization.safe_globals([Allowed]):
        dcp.load(target, storage_reader=Reader(tmp_path / "x"))
    assert target["w"].number == 7


def test_e03_metadata_of_a_class_that_does_not_exist_is_named(tmp_path):
    path = tmp_path / "x"
    dcp.save({"w": torch.ones(2)}, storage_writer=FileSystemWriter(path))
    content = (path / ".metadata").read_bytes()
    old, new = b"TensorProperties", b"TensorProperty99"
    (path / ".metadata").write_bytes(content.replace(old, new))
    with pytest.raises(CheckpointUnsafe, match="newer torch") as caught:
        Reader(path).read_metadata()
    assert "TensorProperty99" in caught.value.found


def test_e03_an_index_of_a_newer_version_says_so(tmp_path):
    from orlop.errors import CheckpointError
    from orlop.store.sealed import seal, unseal

    dcp.save({"w": torch.ones(2)}, storage_writer=Writer(tmp_path / "x"))
    for name, act in (
        ("__0_0.index.json", lambda: dcp.load({"w": torch.ones(2)}, storage_reader=Reader(tmp_path / "x"))),
        ("metadata.json", lambda: Reader(tmp_path / "x").read_metadata()),
    ):
        file = tmp_path / "x" / name
        content = unseal(file.read_bytes())
        file.write_bytes(seal(json.dumps({**content, "version": 2, "orlop_version": "9.1"})))
        with pytest.raises((CheckpointError, dcp.CheckpointException), match="newer orlop"):
            act()


def test_e01_a_list_of_dicts_in_one_blob_as_torch_23_wrote_it_loads(tmp_path):
    # Before 2.4 a list was one byte leaf; there were no version and no transforms in the metadata.
    path = tmp_path / "x"
    leaf = {"groups": [{"lr": 0.1, "params": ["a"]}, {"lr": 0.2, "params": ["b"]}]}
    dcp.save({"groups": leaf}, storage_writer=FileSystemWriter(path), planner=Unflattened())
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for attribute in ("version", "storage_meta"):
        metadata.__dict__.pop(attribute, None)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    target = {"groups": None}
    dcp.load(
        target,
        storage_reader=Reader(path),
        planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
    )
    assert target["groups"] == leaf


class Unflattened(dcp.DefaultSavePlanner):
    def __init__(self):
        super().__init__(flatten_state_dict=False)


def test_a_failing_file_stops_all_threads(tmp_path, monkeypatch):
    state = {f"w{i}": torch.randn(700_000) for i in range(8)}
    dcp.save(state, storage_writer=Writer(tmp_path / "x", num_threads=1))
    before = threading.active_count()
    from orlop.store.files import RangedFile

    def fail(self, offset, buffers):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(RangedFile, "read_into", fail)
    with pytest.raises(dcp.CheckpointException, match="Input/output error"):
        dcp.load(
            {k: torch.zeros_like(v) for k, v in state.items()},
            storage_reader=Reader(tmp_path / "x", num_threads=3),
        )
    assert threading.active_count() == before


def test_b20_memory_stays_bounded(tmp_path):
    state = {"w": torch.randn(64 << 20)}  # 256 MiB in one tensor
    dcp.save(state, storage_writer=Writer(tmp_path / "x"))
    for target in ({"w": torch.zeros(64 << 20)}, {"w": torch.zeros(64 << 20, dtype=torch.float64)}):
        gc.collect()
        before = peak_after(lambda: None)
        peak = peak_after(
            lambda target=target: dcp.load(target, storage_reader=Reader(tmp_path / "x", num_threads=4))
        )
        assert peak - before <= 64 << 20
        assert torch.equal(target["w"][::1000].float(), state["w"][::1000])
    shutil.rmtree(tmp_path / "x")


def peak_after(act):
    """Peak resident bytes while `act` runs: sampled, since the kernel's own mark can't be reset here."""
    done = threading.Event()
    peaks = []

    def watch():
        while not done.is_set():
            fields = Path("/proc/self/statm").read_text().split()
            peaks.append(int(fields[1]) * resource.getpagesize())
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    act()
    done.set()
    watcher.join()
    return max(peaks)
