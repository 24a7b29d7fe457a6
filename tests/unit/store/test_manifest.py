"""`orlop.json` round trips, and says which file and which field is wrong."""

import json
from datetime import timezone
from pathlib import Path

import pytest

from orlop.errors import CheckpointCorrupt, CheckpointError
from orlop.store.manifest import MANIFEST_NAME, Manifest, StateKeys, read_manifest, write_manifest
from orlop.store.sealed import seal
from orlop.version import __version__

MANIFEST = Manifest(
    step=7,
    torch_version="2.13.0",
    world_size=2,
    optimizer_classes={"optimizer": "SwapAdamW"},
    absent={"optimizer": ["branch.weight"]},
    state_keys={"optimizer": StateKeys.of({"a": ["step", "m"], "b": ["m", "step"], "c": ["m"]})},
    parts={"rng": "per_rank", "scheduler": "replicated"},
    files={".metadata": 10, "__0_0.distcp": 99},
    fingerprint={"model.weight": "00ff"},
)


def test_round_trip(tmp_path: Path) -> None:
    write_manifest(tmp_path, MANIFEST)
    assert read_manifest(tmp_path) == MANIFEST
    content = json.loads((tmp_path / MANIFEST_NAME).read_text())
    assert content["schema_version"] == 1
    assert content["orlop_version"] == __version__
    assert content["created"].endswith("Z")
    assert MANIFEST.created.tzinfo is timezone.utc


def test_keys_of_state_are_noted_in_short() -> None:
    record = MANIFEST.state_keys["optimizer"]
    assert record == StateKeys(usual=("m", "step"), others={"c": ("m",)})
    assert [record[fqn] for fqn in "abc"] == [("m", "step"), ("m", "step"), ("m",)]
    assert StateKeys.of({}) == StateKeys()


def test_no_manifest_is_none(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None


def test_a_newer_schema_is_refused_whatever_else_it_holds(tmp_path: Path) -> None:
    (tmp_path / MANIFEST_NAME).write_text('{"schema_version": 2, "orlop_version": "9.1", "step": {"new": 1}}')
    with pytest.raises(CheckpointError, match="written by a newer orlop") as caught:
        read_manifest(tmp_path)
    assert type(caught.value) is CheckpointError
    assert caught.value.where == str(tmp_path / MANIFEST_NAME)
    assert "9.1" in str(caught.value)


def test_an_added_field_is_ignored(tmp_path: Path) -> None:
    content = json.loads(MANIFEST.model_dump_json()) | {"mesh": [2]}
    (tmp_path / MANIFEST_NAME).write_bytes(seal(json.dumps(content)))
    assert read_manifest(tmp_path) == MANIFEST


@pytest.mark.parametrize(
    "text, found",
    [
        ("", "Expecting value"),
        ('{"schema_version": 1', "delimiter"),
        ("[]", "its seal is missing"),
        ("null", "its seal is missing"),
        ('{"schema_version": 1, "torch_version": "2", "world_size": 1}', "its seal is missing"),
        ('{"schema_version": 1, "torch_version": "2", "world_size": "many"}', "world_size"),
        ('{"schema_version": 1, "torch_version": "2", "world_size": 1, "files": {"a": "b"}}', "files.a"),
    ],
)
def test_what_is_no_manifest_is_corrupt_and_names_file_and_field(
    tmp_path: Path, text: str, found: str
) -> None:
    content = seal(text) if "torch" in text and "seal" not in found else text.encode()
    (tmp_path / MANIFEST_NAME).write_bytes(content)
    with pytest.raises(CheckpointCorrupt) as caught:
        read_manifest(tmp_path)
    assert caught.value.where == str(tmp_path / MANIFEST_NAME)
    assert found in str(caught.value.found)
    assert (tmp_path / MANIFEST_NAME).read_bytes() == content


def test_every_flipped_bit_is_seen(tmp_path: Path) -> None:
    write_manifest(tmp_path, MANIFEST)
    path = tmp_path / MANIFEST_NAME
    good = path.read_bytes()
    for place in range(8 * len(good)):
        bad = bytearray(good)
        bad[place // 8] ^= 1 << place % 8
        path.write_bytes(bad)
        with pytest.raises(CheckpointError):
            read_manifest(tmp_path)
    for length in range(len(good)):
        path.write_bytes(good[:length])
        with pytest.raises(CheckpointError):
            read_manifest(tmp_path)
