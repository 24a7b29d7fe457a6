"""Reader and Writer as drop-ins on real ranks: other world sizes and layouts, failing together."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from orlop.dcp import Reader, Writer
from orlop.testing import FaultyFiles, run_ranks

pytestmark = pytest.mark.dist

SHAPES = {"rows": (7, 300), "columns": (5, 40_001), "tiny": (1,), "long": (200_003,)}


def whole(key):
    numbers = torch.arange(torch.Size(SHAPES[key]).numel(), dtype=torch.float32)
    return numbers.reshape(SHAPES[key]) + len(key)


def sharded(mesh, placements, values):
    return {key: distribute_tensor(values(key), mesh, [placements.get(key, Shard(0))]) for key in SHAPES}


def _save(rank, folder):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = sharded(mesh, {"columns": Shard(1), "tiny": Replicate()}, whole)
    state["text"] = {"rank": "any"}
    dcp.save(state, storage_writer=Writer(f"{folder}/x", num_threads=2))
    del state, mesh


def _load(rank, folder, reader):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = sharded(mesh, {"rows": Shard(1), "long": Replicate()}, lambda key: torch.zeros(SHAPES[key]))
    state["text"] = {"rank": None}
    reader = reader(f"{folder}/x")
    dcp.load(state, storage_reader=reader)
    assert state.pop("text") == {"rank": "any"}
    report = getattr(reader, "report", None)
    for key, value in state.items():
        assert torch.equal(value.full_tensor(), whole(key)), key
    del state, value, mesh
    return report


@pytest.mark.parametrize("before, after", [(2, 3), (3, 1), (1, 2)])
def test_another_world_size_and_other_shards(tmp_path, before, after):
    run_ranks(_save, before, str(tmp_path))
    names = sorted(name for name in os.listdir(tmp_path / "x") if name.endswith("distcp"))
    assert len(names) == before
    for report in run_ranks(_load, after, str(tmp_path), Reader):
        assert report.bytes_checked == report.bytes_needed
        assert (report.unchecked, report.fallbacks) == ({}, {})
    run_ranks(_load, after, str(tmp_path), FileSystemReader)


def _caught(act):
    try:
        act()
    except dcp.CheckpointException as error:
        return {
            rank: f"{type(wrapped[0]).__name__}: {wrapped[0]}" for rank, wrapped in error.failures.items()
        }
    return None


def _fail(rank, folder):
    mesh = init_device_mesh("cpu", (2,))
    state = sharded(mesh, {}, whole)
    save = lambda state=state: dcp.save(state, storage_writer=Writer(f"{folder}/y", num_threads=2))  # noqa: E731
    dist.barrier()
    # The first write of a data file; the directory is made before.
    if rank == 1:
        with FaultyFiles(fail_at=2, fault="ENOSPC", lasting=True):
            error = _caught(save)
    else:
        error = _caught(save)
    dist.barrier()
    has_metadata = os.path.exists(f"{folder}/y/.metadata")
    del state, mesh
    return error, has_metadata


def test_c03_a_full_disk_on_one_rank_fails_the_save_on_all(tmp_path):
    first, second = run_ranks(_fail, 2, str(tmp_path), timeout_seconds=60)
    assert first == second
    error, has_metadata = first
    assert "No space left" in error[1]
    assert not has_metadata


def _damage(rank, folder):
    mesh = init_device_mesh("cpu", (2,))
    state = sharded(mesh, {}, lambda key: torch.zeros(SHAPES[key]))
    error = _caught(lambda state=state: dcp.load(state, storage_reader=Reader(f"{folder}/x")))
    del state, mesh
    return error


def test_c10_damage_that_one_rank_meets_is_named_on_all(tmp_path):
    run_ranks(_save, 2, str(tmp_path))
    data = tmp_path / "x" / "__1_0.distcp"
    content = bytearray(data.read_bytes())
    tail = whole("long")[100_002:].numpy().tobytes()  # the second rank's rows
    content[content.index(tail) + len(tail) // 2] ^= 1
    data.write_bytes(content)
    first, second = run_ranks(_damage, 2, str(tmp_path))
    assert first == second
    assert list(first) == [1]
    assert "CheckpointCorrupt" in first[1]
    assert f"long in {tmp_path}" in first[1]
    assert "__1_0.distcp" in first[1]
