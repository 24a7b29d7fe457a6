"""A damaged checkpoint gives a typed error, or exactly the right values; never wrong ones."""

import random
import shutil
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from orlop.dcp import Reader, Writer
from orlop.errors import CheckpointError

SAMPLE = 350  # flips per kind of file, 2,000 and more in all; `python tests/unit/dcp/test_damage.py` tries every bit


def small_state():
    torch.manual_seed(1)
    return {
        "a": torch.randn(5, 7),
        "b": torch.arange(6.0).reshape(2, 3).t(),
        "c": torch.tensor(2.5).bfloat16(),
        "plain": {"lr": 0.25},
    }


def make(path, writer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(small_state(), storage_writer=Writer(path) if writer == "orlop" else FileSystemWriter(path))


class Strict(DefaultLoadPlanner):
    """As torch's planner, but dtypes and shapes must be right, as orlop's own decision demands before a load."""

    def create_local_plan(self):
        for key, value in self.state_dict.items():
            entry = self.metadata.state_dict_metadata.get(key)
            if isinstance(value, torch.Tensor):
                if getattr(entry, "size", None) != value.size() or entry.properties.dtype != value.dtype:
                    raise Refused(key)
            elif hasattr(entry, "size"):
                raise Refused(key)
        return super().create_local_plan()


class Refused(Exception):
    pass


def outcome(path):
    """ "same", or the type of the error; anything else fails the test."""
    expected = small_state()
    target = {
        k: torch.zeros_like(v) if isinstance(v, torch.Tensor) else {"lr": None} for k, v in expected.items()
    }
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reader = Reader(path, num_threads=1)
            reader.read_metadata()
            dcp.load(target, storage_reader=reader, planner=Strict())
    except CheckpointError as error:
        return type(error).__name__ if error.where else "an error that names no place"
    except dcp.CheckpointException as error:
        (cause,) = [failure[0] for failure in error.failures.values()]
        # What the planner finds missing or changed is the planner's to say.
        is_planners = isinstance(cause, (Refused, KeyError)) or "Missing key" in str(cause)
        assert isinstance(cause, CheckpointError) or is_planners, repr(cause)
        return type(cause).__name__
    for key, value in expected.items():
        same = torch.equal(target[key], value) if isinstance(value, torch.Tensor) else target[key] == value
        assert same, f"{key} is wrong, and nobody said so"
    return "same"


def flips(path, places):
    """The outcomes of flipping each of some bits of one file in turn."""
    good = path.read_bytes()
    seen = set()
    for place in places(8 * len(good)):
        bad = bytearray(good)
        bad[place // 8] ^= 1 << place % 8
        path.write_bytes(bad)
        try:
            seen.add(outcome(path.parent))
        except Exception as error:
            raise AssertionError(f"bit {place} of {path.name}") from error
    path.write_bytes(good)
    return seen


NAMES = [
    ("orlop", "__0_0.distcp"),
    ("orlop", "__0_0.index.json"),
    ("orlop", "metadata.json"),
    ("orlop", ".metadata"),
    ("torch", "__0_0.distcp"),
    ("torch", ".metadata"),
]


@pytest.mark.parametrize("writer, name", NAMES)
def test_flipped_bits(tmp_path, writer, name):
    make(tmp_path / "x", writer)
    assert outcome(tmp_path / "x") == "same"
    rng = random.Random(f"{writer}{name}")
    seen = flips(tmp_path / "x" / name, lambda bits: rng.sample(range(bits), min(SAMPLE, bits)))
    assert "CheckpointCorrupt" in seen
    assert "an error that names no place" not in seen
    if name.endswith("json") or (writer, name) == ("orlop", ".metadata"):
        assert "same" not in seen


@pytest.mark.parametrize("writer, name", NAMES)
def test_truncation(tmp_path, writer, name):
    """At every length, but for the data files: they are longer, and 80 lengths are tried of each."""
    make(tmp_path / "x", writer)
    path = tmp_path / "x" / name
    good = path.read_bytes()
    rng = random.Random(f"{writer}{name}")
    every = range(len(good))
    for length in every if len(good) < 2000 else {0, 1, len(good) - 1, *rng.sample(every, 80)}:
        path.write_bytes(good[:length])
        assert outcome(tmp_path / "x") != "same"


def test_a_record_that_says_it_is_compressed_and_is_not(tmp_path):
    # One flipped bit: torch's loader inflates the raw numbers, and is content with what comes out.
    make(tmp_path / "x", "torch")
    path = tmp_path / "x" / "__0_0.distcp"
    good = path.read_bytes()
    name, at, entries = b"archive/data/0", 0, 0
    while (at := good.find(b"PK\x01\x02", at) + 1) > 0:
        if good[at + 45 :].startswith(name):
            entries += 1
            bad = bytearray(good)
            bad[at + 9] ^= 8
            path.write_bytes(bad)
            assert outcome(tmp_path / "x") == "CheckpointCorrupt"
    assert entries == 3


if __name__ == "__main__":
    import sys
    import tempfile
    from pathlib import Path

    for writer, name in NAMES:
        folder = Path(tempfile.mkdtemp())
        make(folder / "x", writer)
        step = int(sys.argv[1]) if len(sys.argv) > 1 else 1
        print(
            writer,
            name,
            sorted(flips(folder / "x" / name, lambda bits, step=step: range(0, bits, step))),
            flush=True,
        )
        shutil.rmtree(folder)
