"""The rules of docs/format.md that a catalog keeps, each broken once: as a pickle and as JSON."""

import json
import pickle

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from orlop import compat
from orlop.dcp.boxes import Box
from orlop.dcp.catalog import Catalog, Extent, TensorEntry, from_json, require_safe_name, to_json
from orlop.dcp.metadata import parse_metadata
from orlop.errors import CheckpointCorrupt


def plain():
    """A leaf of two chunks, and one of plain data, as JSON."""
    boxes = (Box((0, 0), (2, 3)), Box((2, 0), (2, 3)))
    catalog = Catalog(
        leaves={"w": TensorEntry(dtype="float32", sizes=(4, 3), chunks=boxes), "p": None},
        extents={
            ("w", (0, 0)): Extent(path="a.distcp", offset=0, nbytes=100),
            ("w", (2, 0)): Extent(path="a.distcp", offset=100, nbytes=100),
            ("p", None): Extent(path="b.distcp", offset=0, nbytes=10),
        },
        paths={"w": ("m", 0)},
        version="1.0.0",
    )
    return json.loads(json.dumps(to_json(catalog)))


def pickled(content):
    """The same content as DCP would pickle it, with whatever is wrong in it."""
    entries = {}
    for leaf, entry in content["leaves"].items():
        if entry is not None:
            chunks = [ChunkStorageMetadata(tuple(o), tuple(s)) for o, s in entry[2]]
            properties = TensorProperties(getattr(torch, entry[0], torch.float32))
            entries[leaf] = TensorStorageMetadata(properties, tuple(entry[1]), chunks)
    storage = {}
    for leaf, offset, path, at, nbytes in content["extents"]:
        if leaf in entries:
            index = MetadataIndex(leaf)
            object.__setattr__(index, "offset", None if offset is None else tuple(offset))
            storage[index] = compat.storage_info(path, at, nbytes)
    return pickle.dumps(Metadata(entries, planner_data=content["paths"], storage_data=storage))


def test_it_comes_back_both_ways():
    content = plain()
    assert to_json(from_json(content, "x")) == to_json(from_json(json.loads(json.dumps(content)), "x"))
    assert parse_metadata(pickled(content), "x").leaves["w"] == from_json(content, "x").leaves["w"]


BROKEN = {
    "C1 negative size": (["leaves", "w", 1, 0], -1),
    "C1 negative offset": (["leaves", "w", 2, 0, 0, 0], -1),
    "C1 overflowing size": (["leaves", "w", 1, 0], 1 << 70),
    "C1 larger than memory": (["leaves", "w", 1], [1 << 40, 1 << 40]),
    "C1 too many axes": (["leaves", "w", 1], [1] * 65),
    "C1 a bool for a size": (["leaves", "w", 1, 0], True),
    "C1 a float for a size": (["leaves", "w", 1, 0], 4.0),
    "C2 outside": (["leaves", "w", 2, 1, 0, 0], 3),
    "C2 overlap": (["leaves", "w", 2, 1, 0, 0], 1),
    "C2 other axes": (["leaves", "w", 2, 1, 1], [2]),
    "C5 absolute": (["extents", 0, 2], "/etc/passwd"),
    "C5 climbing": (["extents", 0, 2], "../a.distcp"),
    "C5 hidden climbing": (["extents", 0, 2], "x/../../a"),
    "C5 empty": (["extents", 0, 2], ""),
    "C5 no text": (["extents", 0, 2], 7),
    "C1 negative place": (["extents", 0, 3], -5),
    "C1 negative length": (["extents", 0, 4], -5),
    "C1 overflowing place": (["extents", 0, 3], 1 << 63),
    "C6 overlap": (["extents", 1, 3], 99),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_is_refused_and_the_file_named(rule):
    path, value = BROKEN[rule]
    content = plain()
    place = content
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(CheckpointCorrupt) as caught:
        from_json(content, "some/metadata.json")
    assert caught.value.where == "some/metadata.json"
    with pytest.raises(CheckpointCorrupt) as caught:
        parse_metadata(pickled(content), "some/.metadata")
    assert caught.value.where == "some/.metadata"


def test_an_unknown_dtype_is_refused():
    content = plain()
    content["leaves"]["w"][0] = "float128"
    with pytest.raises(CheckpointCorrupt, match="dtype"):
        from_json(content, "x")


def test_c3_a_gap_is_noted_with_its_leaf():
    content = plain()
    del content["leaves"]["w"][2][1]
    assert "6 of its 12" in from_json(content, "x").leaves["w"].gap
    assert "6 of its 12" in parse_metadata(pickled(content), "x").leaves["w"].gap


def test_c4_a_list_that_is_referred_to_again_and_again_is_refused():
    chunks = [ChunkStorageMetadata((n,), (1,)) for n in range(2000)]
    entry = TensorStorageMetadata(TensorProperties(torch.float32), (2000,), chunks)
    content = pickle.dumps(Metadata({f"w{n}": entry for n in range(10)}, storage_data={}))
    parse_metadata(content, "x")
    # Each further leaf costs 20 bytes and would claim 2,000 chunks.
    shared = [TensorStorageMetadata(entry.properties, entry.size, chunks) for _ in range(5000)]
    content = pickle.dumps(Metadata({f"w{n}": each for n, each in enumerate(shared)}, storage_data={}))
    with pytest.raises(CheckpointCorrupt, match="more elements than its bytes"):
        parse_metadata(content, "x")


def test_c6_tied_leaves_may_share_one_record():
    content = plain()
    content["leaves"]["v"] = content["leaves"]["w"]
    content["extents"] += [["v", *rest] for leaf, *rest in content["extents"] if leaf == "w"]
    assert from_json(content, "x").extents["v", (0, 0)] == from_json(content, "x").extents["w", (0, 0)]


def test_another_planners_data_is_left_alone():
    content = plain()
    for paths in ([1], {"w": 3}, {"w": [1.5]}, {"w": [0] * 300}):
        content["paths"] = paths
        assert from_json(content, "x").paths is None


@pytest.mark.parametrize("name", ["/a", "..", "a/../b", "", "a\0b", "a\\b", "C:a", "."])
def test_c5_names_that_lead_out_are_refused(name):
    with pytest.raises(CheckpointCorrupt, match="leads out"):
        require_safe_name(name, "x")


def test_c5_names_below_are_taken():
    require_safe_name("__0_0.distcp", "x")
    require_safe_name("rank0/__0_0.distcp", "x")
