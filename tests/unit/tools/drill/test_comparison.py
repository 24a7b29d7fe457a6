"""Two runs are the same only if every record and every leaf is; what differs first is named."""

import json
from pathlib import Path

import pytest

from orlop.tools.drill.comparison import (
    KINDS,
    bits,
    compare_fingerprints,
    compare_records,
    hint,
    kind_of,
    read_records,
)

LINES = [{"step": step, "loss": 1 / step, "lr": [0.1, float("nan")], "seconds": step} for step in (1, 2, 3)]
LEAVES = {
    "model.w": "aa",
    "optimizer.state.w.exp_avg": "bb",
    "optimizer.state.w.step": "cc",
    "optimizer.param_groups.0.lr": "dd",
    "rng.rank_0": "ee",
    "data.rank_0": "ff",
    "progress": "00",
    "scheduler": "11",
}


def differences(rows):
    return {row.what: row.difference for row in rows if row.difference is not None}


def test_equal_records_whatever_their_wall_time():
    rows = compare_records(LINES, [{**line, "seconds": 9} for line in json.loads(json.dumps(LINES))])
    assert differences(rows) == {}
    assert [row.what for row in rows] == ["steps", "loss", "lr"]


@pytest.mark.parametrize("name, value", [("loss", 0.5000000000000001), ("lr", [0.1, 0.0]), ("loss", None)])
def test_the_first_step_that_differs_is_named(name, value):
    other = [LINES[0], {**LINES[1], name: value}, {**LINES[2], name: value}]
    (found,) = differences(compare_records(LINES, other)).items()
    assert found[0] == name
    assert found[1].startswith("step 2: ")


def test_of_recorded_parts_the_one_that_differs_is_named():
    one = [{"step": 1, "state": {"model": "aa", "rng": "bb"}}]
    two = [{"step": 1, "state": {"model": "aa", "rng": "cc"}}]
    assert differences(compare_records(one, two)) == {"state": "step 1: rng: 'bb' and 'cc'"}


@pytest.mark.parametrize("other", [LINES[:2], [LINES[0], LINES[2]], []])
def test_a_missing_step_is_a_difference(other):
    assert "steps" in differences(compare_records(LINES, other))


def test_bits():
    assert bits(float("nan")) == bits(float("nan"))
    assert bits(0.0) != bits(-0.0)
    assert bits(1) != bits(1.0)
    assert bits({"a": [0.0]}) != bits({"a": [-0.0]})


@pytest.mark.parametrize("leaf", LEAVES)
def test_a_leaf_that_differs_or_is_missing_is_named_in_its_kind(leaf):
    changed = compare_fingerprints(LEAVES, {**LEAVES, leaf: "zz"})
    assert differences(changed) == {kind_of(leaf): f"{leaf}: {LEAVES[leaf]} and zz"}
    missing = {name: digest for name, digest in LEAVES.items() if name != leaf}
    assert kind_of(leaf) in differences(compare_fingerprints(missing, LEAVES))


def test_a_required_kind_that_is_not_there_proves_nothing():
    found = {leaf: digest for leaf, digest in LEAVES.items() if "rng" not in leaf}
    assert differences(compare_fingerprints(found, found)) == {}
    assert differences(compare_fingerprints(found, found, KINDS)) == {
        "random generators": "no leaf to compare"
    }


def test_hints():
    assert hint(compare_records(LINES, LINES)) is None
    assert "not restored" in hint(
        compare_fingerprints(LEAVES, {**LEAVES, "rng.rank_0": "zz", "model.w": "zz"})
    )
    assert "never seeded" in hint(compare_fingerprints(LEAVES, {**LEAVES, "rng.rank_0": "zz"}))
    assert "position" in hint(compare_fingerprints(LEAVES, {**LEAVES, "data.rank_0": "zz"}))
    assert "schedule" in hint(compare_records(LINES, [{**line, "lr": 1, "loss": 2} for line in LINES]))
    assert "data order" in hint(compare_records(LINES, [{**line, "loss": 2} for line in LINES]))


def test_a_hint_blames_no_scheduler_and_no_random_streams_that_are_not_there():
    off = compare_records(LINES, [{**line, "lr": 1} for line in LINES])
    without = {leaf: digest for leaf, digest in LEAVES.items() if leaf not in ("rng.rank_0", "scheduler")}
    assert "is the scheduler saved" in hint([*off, *compare_fingerprints(LEAVES, LEAVES)])
    assert "no scheduler in the checkpoints" in hint([*off, *compare_fingerprints(without, without)])
    off = compare_records(LINES, [{**line, "loss": 2} for line in LINES])
    assert "dropout's random stream" in hint([*off, *compare_fingerprints(LEAVES, LEAVES)])
    assert "no random generators in the checkpoints" in hint([*off, *compare_fingerprints(without, without)])


def test_a_data_position_that_is_not_saved_is_the_cause_and_not_the_random_streams():
    without = {leaf: digest for leaf, digest in LEAVES.items() if leaf != "data.rank_0"}
    same, lost = compare_fingerprints(without, without), "no data position is saved"
    loss = compare_records(LINES, [{**line, "loss": 2} for line in LINES])
    streams = compare_fingerprints(without, {**without, "rng.rank_0": "zz", "model.w": "zz"})
    assert lost in hint([*loss, *same])
    assert lost in hint([*loss, *streams])
    assert lost in hint(compare_fingerprints(without, without, KINDS))
    # What the position has no part in is blamed as before.
    assert "never seeded" in hint(compare_fingerprints(without, {**without, "rng.rank_0": "zz"}))
    rates = compare_records(LINES, [{**line, "lr": 1, "loss": 2} for line in LINES])
    assert "schedule" in hint([*rates, *same])
    moments = {leaf: "zz" if kind_of(leaf) == "moments" else digest for leaf, digest in without.items()}
    assert "moments" in hint([*loss, *compare_fingerprints(without, moments)], went_on_from=[99])
    neither = {leaf: digest for leaf, digest in without.items() if leaf != "rng.rank_0"}
    assert "no random generators" in hint([*loss, *compare_fingerprints(neither, neither)])


def test_reading_leaves_out_torn_lines_and_takes_a_step_that_was_done_again(tmp_path: Path):
    path = tmp_path / "records.jsonl"
    assert read_records(path) == []
    path.write_text('{"step": 1}\n{"step": 2, "x": 1}\n{"st\n\n{"step": 2, "x": 2}\n{"ste')
    assert read_records(path) == [{"step": 1}, {"step": 2, "x": 2}]
    assert read_records(path, last=1) == [{"step": 2, "x": 2}]
