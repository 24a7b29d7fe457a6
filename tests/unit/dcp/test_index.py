"""The rules of docs/format.md that an index keeps, each broken once."""

import json

import pytest

from orlop.dcp.boxes import Box
from orlop.dcp.catalog import Extent
from orlop.dcp.checksums import pack
from orlop.dcp.index import IndexRecord, index_name, parse_index, render_index
from orlop.dcp.source import find_record, from_index
from orlop.errors import CheckpointCorrupt
from orlop.store.sealed import seal, unseal

FILE = "__0_0.distcp"
RECORDS = (
    IndexRecord(
        leaf="w",
        dtype="float32",
        box=Box((2, 0), (2, 3)),
        record=(64, 400),
        data=(128, 24),
        checksums=pack([7]),
    ),
    IndexRecord(leaf="p", dtype=None, box=None, record=(512, 80), data=(512, 80), checksums=pack([8])),
)
CONTENT = render_index(FILE, 600, RECORDS)


def test_it_comes_back():
    index = parse_index(CONTENT, FILE, "x")
    assert (index.file, index.nbytes, index.records) == (FILE, 600, RECORDS)
    assert index.records[0].crcs() == (7,)
    assert index_name(FILE) == "__0_0.index.json"


def changed(path, value):
    content = unseal(CONTENT)
    place = content
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return seal(json.dumps(content))


BROKEN = {
    "I1 other file": (["file"], "__1_0.distcp"),
    "I1 other blocks": (["block_bytes"], 4096),
    "I1 no size": (["nbytes"], -1),
    "I2 outside": (["records", 1, "record"], [512, 100]),
    "I2 overlap": (["records", 1, "record"], [400, 192]),
    "I2 negative": (["records", 0, "record"], [-64, 400]),
    "I2 three numbers": (["records", 0, "record"], [64, 400, 1]),
    "I3 data outside": (["records", 0, "data"], [32, 24]),
    "I3 data beyond": (["records", 0, "data"], [450, 24]),
    "I3 other length": (["records", 0, "data"], [128, 28]),
    "I3 unknown dtype": (["records", 0, "dtype"], "float128"),
    "I3 no box": (["records", 0, "box"], None),
    "I3 huge box": (["records", 0, "box"], [[0, 0], [1 << 61, 1 << 61]]),
    "I4 too many checksums": (["records", 0, "crc"], pack([7, 8])),
    "I4 too few checksums": (["records", 0, "crc"], ""),
    "I4 no text": (["records", 0, "crc"], 7),
    "no leaf": (["records", 0, "leaf"], None),
    "no records": (["records"], None),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_is_refused_and_the_file_named(rule):
    with pytest.raises(CheckpointCorrupt) as caught:
        parse_index(changed(*BROKEN[rule]), FILE, "some/index")
    assert caught.value.where == "some/index"


def test_checksums_that_are_no_base64_are_seen_when_they_are_used():
    index = parse_index(changed(["records", 0, "crc"], "!!!!!!=="), FILE, "x")
    with pytest.raises(CheckpointCorrupt, match="checksums"):
        from_index(index.records[0], Box((2, 0), (2, 3)), "float32", FILE, f"w in {FILE}")


def test_i5_index_and_metadata_must_agree():
    index = parse_index(CONTENT, FILE, "x")
    right = Extent(path=FILE, offset=64, nbytes=400)
    record = find_record(index, "w", right, (), "w in x")
    assert find_record(index, "tied", right, ("w", "tied"), "w in x") is record
    for leaf, extent in (
        ("w", Extent(path=FILE, offset=64, nbytes=401)),
        ("w", Extent(path=FILE, offset=65, nbytes=400)),
        ("other", right),
    ):
        with pytest.raises(CheckpointCorrupt, match="contradict") as caught:
            find_record(index, leaf, extent, (), f"{leaf} in x/{FILE}")
        assert caught.value.where == f"{leaf} in x/{FILE}"
    assert from_index(record, Box((2, 0), (2, 3)), "float32", FILE, "w in x").at == 128
    for box, dtype in ((Box((0, 0), (2, 3)), "float32"), (Box((2, 0), (2, 3)), "int32")):
        with pytest.raises(CheckpointCorrupt, match="contradict"):
            from_index(record, box, dtype, FILE, "w in x")


def test_s1_every_flipped_bit_and_cut_is_seen():
    for place in range(8 * len(CONTENT)):
        bad = bytearray(CONTENT)
        bad[place // 8] ^= 1 << place % 8
        with pytest.raises(CheckpointCorrupt):
            parse_index(bytes(bad), FILE, "x")
    for length in range(len(CONTENT)):
        with pytest.raises(CheckpointCorrupt):
            parse_index(CONTENT[:length], FILE, "x")
