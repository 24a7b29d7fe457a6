"""Two runs are compared bit for bit, and the first difference is named."""

import json
from pathlib import Path
from typing import Any

import pytest

from comparison import Comparison, bits, compare_fingerprints, compare_metrics, kind_of, read_metrics

LEAVES = {
    "model.a.weight": "01",
    "optimizer.state.a.weight.exp_avg": "02",
    "optimizer.state.a.weight.step": "03",
    "optimizer.param_groups.0.lr": "04",
    "rng.rank_0": "05",
    "data.rank_1": "06",
    "progress": "07",
    "scheduler": "08",
}


def lines(count: int = 3) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "loss": 1 / step,
            "grad_norm": 0.5,
            "lr": [0.1, 0.2],
            "tokens": 8 * step,
            "seconds": 1.0,
        }
        for step in range(1, count + 1)
    ]


def differences(rows: list[Comparison]) -> dict[str, str]:
    return {row.what: row.difference for row in rows if row.difference is not None}


def test_equal_runs_have_no_difference_whatever_their_seconds() -> None:
    other = [{**line, "seconds": 9.0} for line in lines()]
    rows = compare_metrics(lines(), other)
    assert differences(rows) == {}
    assert [(row.what, row.count) for row in rows][:2] == [("steps", 3), ("loss", 3)]


def test_one_bit_of_one_step_is_found_and_named() -> None:
    other = lines()
    other[1]["loss"] = float.fromhex("0x1.0000000000001p-1")
    other[2]["loss"] = 7.0
    assert differences(compare_metrics(lines(), other)) == {"loss": "step 2: 0.5 and 0.5000000000000001"}


def test_a_group_lr_is_compared() -> None:
    other = lines()
    other[0]["lr"] = [0.1, 0.3]
    assert differences(compare_metrics(lines(), other)) == {"lr": "step 1: [0.1, 0.2] and [0.1, 0.3]"}


@pytest.mark.parametrize(
    "other, where",
    [
        (lines(2), "line 3: step 3 and step None"),
        ([lines()[0], *lines()], "line 2: step 2 and step 1"),
        (lines()[1:], "line 1: step 1 and step 2"),
    ],
)
def test_a_step_missing_or_there_twice_is_a_difference(other: list[dict[str, Any]], where: str) -> None:
    assert differences(compare_metrics(lines(), other))["steps"] == where


def test_both_lacking_the_same_step_is_a_difference_too() -> None:
    assert differences(compare_metrics(lines()[1:], lines()[1:])) == {"steps": "line 1: step 2 and step 2"}


def test_bits() -> None:
    assert bits(float("nan")) == bits(float("nan"))
    assert bits(0.0) != bits(-0.0)
    assert bits(1) != bits(1.0)
    assert bits([0.0, 1.0]) == bits([0.0, 1.0])


def test_equal_fingerprints() -> None:
    one = {"total": "aa", "leaves": LEAVES}
    rows = compare_fingerprints(one, json.loads(json.dumps(one)))
    assert differences(rows) == {}
    assert sum(row.count for row in rows) == len(LEAVES) + 1


@pytest.mark.parametrize("leaf", LEAVES)
def test_a_leaf_that_differs_or_is_missing_is_named_in_its_kind(leaf: str) -> None:
    one = {"total": "aa", "leaves": LEAVES}
    changed = compare_fingerprints(one, {"total": "bb", "leaves": {**LEAVES, leaf: "ff"}})
    assert differences(changed) == {
        kind_of(leaf): f"{leaf}: {LEAVES[leaf]} and ff",
        "whole state": "aa and bb",
    }
    missing = {name: digest for name, digest in LEAVES.items() if name != leaf}
    assert kind_of(leaf) in differences(compare_fingerprints({"total": "aa", "leaves": missing}, one))


def test_a_fingerprint_without_a_kind_of_state_proves_nothing() -> None:
    one = {"total": "aa", "leaves": {leaf: digest for leaf, digest in LEAVES.items() if "rng" not in leaf}}
    assert differences(compare_fingerprints(one, one)) == {"random generators": "no leaf to compare"}


def test_kinds() -> None:
    assert [kind_of(leaf) for leaf in LEAVES] == [
        "parameters and buffers",
        "moments",
        "step counters",
        "param groups",
        "random generators",
        "sampler",
        "progress counters",
        "scheduler",
    ]


def test_read_metrics_leaves_out_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == []
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert read_metrics(path) == [{"step": 1}, {"step": 2}]
    assert read_metrics(path, last=1) == [{"step": 2}]
