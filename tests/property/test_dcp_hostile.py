"""Hostile metadata, indexes and records: typed errors only, in bounded time and memory.

`python tests/property/test_dcp_hostile.py SECONDS` goes on for that long, with seeds of its own.
"""

import io
import json
import pickle
import random
import sys
import time
import tracemalloc
from contextlib import suppress

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from orlop import compat
from orlop.dcp import safe
from orlop.dcp.archive import Unusual, locate_tensor
from orlop.dcp.boxes import Box
from orlop.dcp.catalog import Catalog, from_json, to_json
from orlop.dcp.index import IndexRecord, parse_index, render_index
from orlop.dcp.metadata import parse_metadata
from orlop.dcp.pickled import read_pickle
from orlop.dcp.standard import from_torch, to_torch
from orlop.errors import CheckpointError
from orlop.store.sealed import seal, unseal


def _metadata():
    entries, storage = {}, {}
    for number in range(4):
        chunks = [ChunkStorageMetadata(torch.Size([2 * part, 0]), torch.Size([2, 3])) for part in range(2)]
        entries[f"w{number}"] = TensorStorageMetadata(
            TensorProperties(torch.float32), torch.Size([4, 3]), chunks
        )
        for part, chunk in enumerate(chunks):
            place = compat.storage_info(f"__{part}_0.distcp", 1000 * number, 900)
            storage[MetadataIndex(f"w{number}", chunk.offsets, part)] = place
    entries["plain"] = BytesStorageMetadata()
    storage[MetadataIndex("plain")] = compat.storage_info("__0_0.distcp", 9000, 10)
    return Metadata(entries, planner_data={"w0": ("w0",), "plain": ("a", 0)}, storage_data=storage)


def _saved(value):
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


METADATA = pickle.dumps(_metadata())
CATALOG = to_json(from_torch(_metadata()))
RECORD = _saved(torch.arange(12.0).reshape(3, 4))
LEAF = _saved({"lr": 0.1, "betas": (0.9, 0.99), ("a", 1): [torch.ones(2)]})
INDEX = unseal(
    render_index(
        "__0_0.distcp",
        5000,
        [
            IndexRecord(
                leaf="w",
                dtype="float32",
                box=Box((0,), (9,)),
                record=(0, 900),
                data=(64, 36),
                checksums="AAAAAA==",
            )
        ],
    )
)


def by_metadata(data):
    to_torch(parse_metadata(data, "x"))


def by_record(data):
    found = locate_tensor(lambda offset, count: data[offset : offset + count], len(data), "x")
    assert 0 <= found.data_at <= found.data_at + found.nbytes <= len(data)


def by_leaf(data):
    safe.load(data, "x")


READERS = [(by_metadata, METADATA), (by_record, RECORD), (by_leaf, LEAF)]


def attempt(read, data):
    """Read; anything but success or a typed error fails, and so does an appetite."""
    tracemalloc.start()
    begin = time.perf_counter()
    with suppress(CheckpointError, Unusual):
        read(data)
    seconds, peak = time.perf_counter() - begin, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert seconds < 5, seconds
    assert peak < (4 << 20) + 500 * len(data), peak


def mutated(data, edits):
    """Some bytes changed, taken out, put in or repeated."""
    result = bytearray(data)
    for kind, at, value, count in edits:
        at %= max(1, len(result))
        if kind == 0:
            result[at : at + 1] = bytes([value])
        elif kind == 1:
            del result[at : at + count]
        elif kind == 2:
            result[at:at] = bytes([value]) * count
        else:
            result[at:at] = result[at : at + count]
    return bytes(result)


EDITS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 5000), st.integers(0, 255), st.integers(1, 40)),
    min_size=1,
    max_size=6,
)


@settings(max_examples=300, deadline=None)
@given(EDITS, st.sampled_from(READERS))
def test_mutated_bytes(edits, reader):
    read, data = reader
    attempt(read, mutated(data, edits))


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=400))
def test_any_bytes(data):
    for read, _ in READERS:
        attempt(read, data)
    attempt(lambda data: read_pickle(data, None, "x"), b"\x80\x04" + data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def paths(value, path=()):
    """Every place in nested JSON data."""
    yield path
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in pairs:
        yield from paths(item, (*path, key))


def replaced(value, path, new):
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


PLAIN_CATALOG = json.loads(json.dumps(CATALOG))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_value_anywhere_in_a_well_sealed_file(data):
    for content, read in (
        (PLAIN_CATALOG, lambda changed: from_json(json.loads(json.dumps(changed)), "x")),
        (INDEX, lambda changed: parse_index(seal(json.dumps(changed)), "__0_0.distcp", "x")),
    ):
        path = data.draw(st.sampled_from(list(paths(content))))
        changed = replaced(content, path, data.draw(JSON))
        if not isinstance(changed, dict) or not changed or "digest" in changed:
            continue
        attempt(lambda _, changed=changed, read=read: read(changed), json.dumps(changed).encode())


def test_the_unchanged_ones_are_read():
    assert parse_metadata(METADATA, "x") == from_torch(_metadata())
    assert isinstance(from_json(PLAIN_CATALOG, "x"), Catalog)
    assert len(parse_index(seal(json.dumps(INDEX)), "__0_0.distcp", "x").records) == 1
    by_record(RECORD)
    by_leaf(LEAF)


if __name__ == "__main__":
    end, rounds = time.time() + float(sys.argv[1]), 0
    seed = random.randrange(1 << 30)
    print("seed", seed, flush=True)
    rng = random.Random(seed)
    while time.time() < end:
        edits = [
            (rng.randrange(4), rng.randrange(5000), rng.randrange(256), rng.randint(1, 40))
            for _ in range(rng.randint(1, 6))
        ]
        for read, data in READERS:
            try:
                attempt(read, mutated(data, edits))
            except BaseException:
                print(f"{read.__name__} after {rounds} rounds: {edits}")
                raise
        rounds += 1
    print(f"{rounds} rounds of {len(READERS)} readers, nothing but typed errors")
