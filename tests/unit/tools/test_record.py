"""`orlop.record` leaves what a drill compares, and survives a torn file."""

import json

from tests.unit.tools.samples import engine, train

import orlop
from orlop.tools.drill.comparison import read_records
from orlop.tools.drill.runs import RUN_VARIABLE


def test_records_name_the_step_the_values_and_each_parts_state(tmp_path):
    trained = engine()
    loss = train(trained)
    orlop.record(1, trained, run=tmp_path / "run", loss=loss)
    before = orlop.fingerprint(trained)
    train(trained)
    orlop.record(2, trained, run=tmp_path / "run", loss=0.5)
    one, two = read_records(tmp_path / "run" / "records.jsonl")
    assert (one["step"], one["loss"], two["step"], two["loss"]) == (1, loss, 2, 0.5)
    assert set(one["state"]) == {"model", "optimizer", "rng"}
    assert one["state"]["model"] != two["state"]["model"]
    final = json.loads((tmp_path / "run" / "fingerprint.json").read_text())
    assert final == {"step": 2, "leaves": dict(orlop.fingerprint(trained).leaves)}
    assert before != orlop.fingerprint(trained)


def test_after_a_torn_line_the_next_ones_count(tmp_path):
    trained = engine()
    orlop.record(1, trained, run=tmp_path)
    path = tmp_path / "records.jsonl"
    path.write_bytes(path.read_bytes() + b'\n{"step": 2, "lo')
    orlop.record(2, trained, run=tmp_path)
    assert [record["step"] for record in read_records(path)] == [1, 2]


def test_without_a_directory_it_records_in_a_drill_alone(tmp_path, monkeypatch):
    trained = engine()
    orlop.record(1, trained)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv(RUN_VARIABLE, str(tmp_path / "run"))
    orlop.record(2, trained, loss=0.5)
    assert [(line["step"], line["loss"]) for line in read_records(tmp_path / "run" / "records.jsonl")] == [
        (2, 0.5)
    ]
    orlop.record(3, trained, run=tmp_path / "other")
    assert [line["step"] for line in read_records(tmp_path / "other" / "records.jsonl")] == [3]
