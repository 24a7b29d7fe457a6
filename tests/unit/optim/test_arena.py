from __future__ import annotations

import gc
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orlop.errors import HostMemoryError
from orlop.optim.arena import Arena, plan_block
from orlop.optim.host import HostMemory, read_host_memory, require_host_memory
from orlop.optim.probe import LeafSpec

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.uint8]


def leaf_spec(shape, dtype=torch.float32):
    meta = torch.empty(shape, dtype=dtype, device="meta")
    return LeafSpec(shape=meta.shape, stride=meta.stride(), dtype=dtype, elementwise=True)


specs = st.lists(
    st.builds(leaf_spec, st.lists(st.integers(0, 40), max_size=3).map(tuple), st.sampled_from(DTYPES)),
    min_size=1,
    max_size=40,
)


@given(specs)
def test_leaves_never_overlap_and_padding_stays_under_two_percent(given_specs):
    plan = plan_block(given_specs)
    taken = sorted(
        (offset, offset + spec.nbytes) for offset, spec in zip(plan.offsets, given_specs) if spec.nbytes
    )
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(taken))
    assert all(offset % spec.dtype.itemsize == 0 for offset, spec in zip(plan.offsets, given_specs))
    assert all(offset + spec.nbytes <= plan.nbytes for offset, spec in zip(plan.offsets, given_specs))
    state = sum(spec.nbytes for spec in given_specs)
    assert plan.nbytes <= 1.02 * state + 16


@given(specs)
def test_every_leaf_keeps_what_is_written_to_it(given_specs):
    arena = Arena(pinned=False)
    leaves = arena.grow(given_specs)
    for number, leaf in enumerate(leaves):
        assert not leaf.any()
        leaf.fill_(number)
    for number, (leaf, spec) in enumerate(zip(leaves, given_specs)):
        assert (leaf.shape, leaf.stride(), leaf.dtype) == (spec.shape, spec.stride, spec.dtype)
        assert bool((leaf == number).all())
        assert leaf.storage_offset() == 0
        assert arena.holds(leaf)


def test_blocks_are_of_exact_size_and_never_move():
    arena = Arena(pinned=False)
    (first,) = arena.grow([leaf_spec((1000, 1000))])
    pointer = first.data_ptr()
    second = arena.grow([leaf_spec((3,))])
    assert first.data_ptr() == pointer
    assert arena.num_blocks == 2
    assert arena.nbytes == 4_000_000 + 12
    assert not arena.holds(torch.zeros(3))
    del second
    assert (arena.num_blocks, arena.nbytes) == (1, 4_000_000)


def test_strides_are_kept():
    meta = torch.empty(4, 3, 5, 5, device="meta").to(memory_format=torch.channels_last)
    spec = LeafSpec(shape=meta.shape, stride=meta.stride(), dtype=meta.dtype, elementwise=True)
    (leaf,) = Arena(pinned=False).grow([spec])
    assert leaf.is_contiguous(memory_format=torch.channels_last)


def test_a_block_lives_as_long_as_one_of_its_leaves():
    arena = Arena(pinned=False)
    leaves = arena.grow([leaf_spec((100,)), leaf_spec((100,))])
    block = arena._blocks[0].owner
    leaves[1].fill_(7)
    del arena, leaves[0]
    gc.collect()
    assert block() is not None
    assert bool((leaves[0] == 7).all())
    leaves.clear()
    gc.collect()
    assert block() is None


def test_a_host_that_is_too_small_is_told_per_rank_and_per_host(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    arena = Arena(pinned=False)
    memory = HostMemory(available_bytes=3 * 2**30, cgroup_bytes=None)
    with pytest.raises(
        HostMemoryError, match=r"1\.00 GiB of host memory per rank, 4\.00 GiB .* for the host"
    ) as caught:
        arena.grow([leaf_spec((2**28,))], memory)
    assert isinstance(caught.value, MemoryError)
    assert arena.nbytes == 0


@pytest.mark.parametrize(
    "available, cgroup, refused",
    [(100, None, False), (99, None, True), (None, 99, True), (1000, 99, True), (None, None, False)],
)
def test_the_tighter_limit_counts(available, cgroup, refused):
    memory = HostMemory(available_bytes=available, cgroup_bytes=cgroup)
    if refused:
        with pytest.raises(HostMemoryError):
            require_host_memory(50, 2, memory)
    else:
        require_host_memory(50, 2, memory)


@pytest.mark.parametrize("version", [1, 2])
def test_limits_are_read_from_both_kinds_of_control_groups(tmp_path, version):
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 900 kB\nMemAvailable: 500 kB\n")
    inner = groups / ("memory" if version == 1 else "") / "job" / "step"
    inner.mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("5:cpu,memory:/job/step\n" if version == 1 else "0::/job/step\n")
    limit, usage = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes")
        if version == 1
        else ("memory.max", "memory.current")
    )
    (inner / limit).write_text("max\n")
    (inner / usage).write_text("5000\n")
    (inner.parent / limit).write_text("100000\n")
    (inner.parent / usage).write_text("60000\n")
    (inner.parent / "memory.stat").write_text("anon 1\ninactive_file 20000\n")
    memory = read_host_memory(proc, groups)
    assert memory == HostMemory(available_bytes=500 * 1024, cgroup_bytes=60000)
    assert memory.free_bytes == 60000


def test_a_machine_that_tells_nothing_refuses_nothing(tmp_path):
    assert read_host_memory(tmp_path, tmp_path).free_bytes is None


def test_a_limit_for_locked_memory_is_warned_of_and_a_lock_that_fails_is_an_error(monkeypatch, caplog):
    monkeypatch.setattr("orlop.optim.host.locked_memory_limit", lambda: 1000)
    monkeypatch.setattr("orlop.compat.register_pinned", lambda address, nbytes: None)
    arena = Arena(pinned=True)
    if torch.accelerator.is_available():
        pytest.skip("here the lock does not fail")
    with caplog.at_level("WARNING", "orlop"), pytest.raises(HostMemoryError, match="page-lock"):
        arena.grow([leaf_spec((1000,))])
    assert "limit for locked memory of 1,000 bytes" in caplog.text
