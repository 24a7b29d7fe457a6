import inspect
import io
import pickle
import threading
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from orlop.dcp import Reader, Writer
from orlop.dcp.index import parse_index
from orlop.dcp.metadata import parse_metadata
from orlop.dcp.standard import from_torch
from orlop.dcp.writer import share_out
from orlop.errors import CheckpointExists, CheckpointIncomplete
from orlop.store.sealed import digest
from orlop.testing import FaultyFiles

from .conftest import assert_equal, blank

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

STRIDED = {
    "turned": torch.arange(400_000.0).reshape(500, 800).t(),
    "columns": torch.arange(90_000.0).reshape(300, 300)[:, 17:200],
    "every third": torch.arange(3000)[::3],
    "conjugate": torch.randn(5, dtype=torch.complex64).conj(),
    "expanded": torch.ones(3, 1).expand(3, 1000),
}


def test_plain_torch_reads_what_was_written(tmp_path, state):
    state |= STRIDED
    dcp.save(state, storage_writer=Writer(tmp_path / "x"))
    for reader in (dcp.FileSystemReader(tmp_path / "x"), Reader(tmp_path / "x")):
        target = {k: v.clone() if k == "expanded" else v for k, v in blank(state).items()}
        dcp.load(target, storage_reader=reader)
        assert_equal(target, state)


def test_a_single_record_is_what_torch_load_takes(tmp_path, state):
    dcp.save(state, storage_writer=Writer(tmp_path / "x"))
    metadata = pickle.loads((tmp_path / "x" / ".metadata").read_bytes())
    for index, info in metadata.storage_data.items():
        with (tmp_path / "x" / info.relative_path).open("rb") as file:
            file.seek(info.offset)
            value = torch.load(io.BytesIO(file.read(info.length)), weights_only=True)
        if isinstance(state.get(index.fqn), torch.Tensor):
            assert torch.equal(value, state[index.fqn])


def test_the_sealed_twin_says_what_the_metadata_says(tmp_path, state):
    dcp.save(state, storage_writer=Writer(tmp_path / "x"))
    content = (tmp_path / "x" / ".metadata").read_bytes()
    assert parse_metadata(content, "x") == from_torch(pickle.loads(content))
    ours, parsed = Reader(tmp_path / "x")._contents.catalog(), parse_metadata(content, "x")
    assert ours == parsed


def test_the_index_tells_every_record_and_its_checksums(tmp_path, state):
    writer = Writer(tmp_path / "x", num_threads=2)
    dcp.save(state, storage_writer=writer)
    seen = set()
    for data in (tmp_path / "x").glob("*.distcp"):
        name = data.name.replace(".distcp", ".index.json")
        content = (tmp_path / "x" / name).read_bytes()
        assert writer.digests[name] == digest(content)
        index = parse_index(content, data.name, name)
        assert index.nbytes == data.stat().st_size
        for record in index.records:
            seen.add(record.leaf)
            raw = data.read_bytes()[record.data[0] : sum(record.data)]
            assert record.crcs() == tuple(
                zlib.crc32(raw[at : at + 65536]) for at in range(0, len(raw), 65536)
            )
            if record.dtype is not None:
                assert raw == state[record.leaf].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    assert seen >= {key for key, value in state.items() if isinstance(value, torch.Tensor)}
    assert writer.digests["metadata.json"] == digest((tmp_path / "x" / "metadata.json").read_bytes())


def test_f12_a_view_writes_its_own_bytes_only(tmp_path):
    dcp.save({"w": torch.randn(1_000_000)[5:15]}, storage_writer=Writer(tmp_path / "x"))
    assert sum(file.stat().st_size for file in (tmp_path / "x").glob("*.distcp")) < 4096


def test_a_checkpoint_is_not_written_over(tmp_path):
    dcp.save({"w": torch.ones(2)}, storage_writer=Writer(tmp_path / "x"))
    before = {file.name: file.read_bytes() for file in (tmp_path / "x").iterdir()}
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.save({"w": torch.zeros(2)}, storage_writer=Writer(tmp_path / "x"))
    assert isinstance(caught.value.failures[0][0], CheckpointExists)
    assert {file.name: file.read_bytes() for file in (tmp_path / "x").iterdir()} == before


@pytest.mark.parametrize("which", ["first", "middle", "last"])
def test_c03_a_failed_write_in_any_thread_fails_the_save(tmp_path, which):
    state = {f"w{i}": torch.randn(3 << 20) for i in range(6)}
    with FaultyFiles() as disk:
        dcp.save(state, storage_writer=Writer(tmp_path / "good", num_threads=3))
    writes = [n for n, operation in enumerate(disk.operations) if operation.kind == "write"]
    at = {"first": writes[0], "middle": writes[len(writes) // 2], "last": writes[-1]}[which]
    before = threading.active_count()
    with FaultyFiles(fail_at=at, fault="ENOSPC"), pytest.raises(dcp.CheckpointException) as caught:
        dcp.save(state, storage_writer=Writer(tmp_path / "bad", num_threads=3))
    (cause,) = [failure[0] for failure in caught.value.failures.values()]
    assert isinstance(cause, OSError)
    assert cause.errno == 28
    assert not (tmp_path / "bad" / ".metadata").exists()
    assert threading.active_count() == before


def test_short_writes_and_signals_change_nothing(tmp_path, state):
    for number in range(0, 12, 3):
        for fault in ("short write", "EINTR"):
            path = tmp_path / f"{number} {fault}"
            with FaultyFiles(fail_at=number, fault=fault):
                dcp.save(state, storage_writer=Writer(path))
            target = blank(state)
            dcp.load(target, storage_reader=Reader(path))
            assert_equal(target, state)


class Torn(DefaultSavePlanner):
    """Forgets a chunk, as a broken planner would."""

    def create_global_plan(self, all_plans):
        plans, metadata = super().create_global_plan(all_plans)
        item = plans[0].items[0]
        item.tensor_data.chunk.sizes = torch.Size([1, 2])
        return plans, metadata


def test_a_tensor_that_would_not_be_whole_is_refused_before_a_byte_is_written(tmp_path):
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.save({"w": torch.ones(2, 2)}, storage_writer=Writer(tmp_path / "x"), planner=Torn())
    (cause,) = [failure[0] for failure in caught.value.failures.values()]
    assert isinstance(cause, CheckpointIncomplete)
    assert cause.where == "w"
    assert list((tmp_path / "x").iterdir()) == []


def test_threads_share_the_bytes_and_small_saves_make_one_file(tmp_path):
    dcp.save({"w": torch.ones(9)}, storage_writer=Writer(tmp_path / "small", num_threads=4))
    assert len(list((tmp_path / "small").glob("*.distcp"))) == 1
    state = {f"w{i}": torch.ones(3 << 20) for i in range(4)}
    dcp.save(state, storage_writer=Writer(tmp_path / "large", num_threads=2))
    sizes = [file.stat().st_size for file in (tmp_path / "large").glob("*.distcp")]
    assert len(sizes) == 2
    assert max(sizes) < 1.01 * min(sizes)


def test_many_small_tensors_make_one_file():
    # Their records are Python's work: threads would only wait for each other.
    items = plan_of({f"w{i}": torch.ones(3000) for i in range(2000)})
    assert sum(item.tensor_data.size.numel() * 4 for item in items) > 16 << 20
    assert [len(bucket) for bucket in share_out(items, 4)] == [2000]
    items += plan_of({f"large{i}": torch.ones(2 << 20) for i in range(4)})
    assert [len(bucket) for bucket in share_out(items, 2)] == [1002, 1002]


def plan_of(state):
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    return planner.create_local_plan().items


def test_everything_is_fsynced_and_the_metadata_comes_last(tmp_path, state):
    with FaultyFiles() as disk:
        dcp.save(state, storage_writer=Writer(tmp_path / "x"))
    done = [(operation.kind, operation.path.name) for operation in disk.operations]
    files = {Path(name).name for kind, name in done if kind == "open"}
    for name in files:
        last_write = max(n for n, entry in enumerate(done) if entry == ("write", name))
        assert ("fsync", name) in done[last_write:], name
    renames = [n for n, (kind, _) in enumerate(done) if kind == "rename"]
    assert disk.operations[renames[-1]].target.name == ".metadata"
    assert not any(kind in ("open", "write") for kind, _ in done[renames[-1] :])
    assert done[-1] == ("fsync", "x")


@pytest.mark.skipif(
    "use_collectives" not in inspect.signature(dcp.save).parameters, reason="this torch has no such save"
)
def test_a_save_without_collectives_has_metadata_of_each_rank(tmp_path, state):
    dcp.save(state, storage_writer=Writer(tmp_path / "x"), use_collectives=False)
    assert sorted(file.name for file in (tmp_path / "x").iterdir()) == [
        "__0.metadata",
        "__0_0.distcp",
        "__0_0.index.json",
    ]
    for reader in (Reader(tmp_path / "x"), dcp.FileSystemReader(tmp_path / "x")):
        target = blank(state)
        dcp.load(target, storage_reader=reader)
        assert_equal(target, state)


def test_an_asynchronous_save_is_the_same(tmp_path, state):
    if not dist.is_initialized():
        store = dist.FileStore(str(tmp_path / "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        dcp.async_save(state, storage_writer=Writer(tmp_path / "x")).result()
        target = blank(state)
        dcp.load(target, storage_reader=Reader(tmp_path / "x"))
        assert_equal(target, state)
    finally:
        dist.destroy_process_group()
