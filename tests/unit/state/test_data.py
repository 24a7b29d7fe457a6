"""state/data: the next batch after a resume is the one that followed the save (F09), for every kind of
data."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from orlop.errors import CheckpointMismatch, OrlopError
from orlop.state.data import DataStream
from orlop.state.rng import RngState


class Samples(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        return index


class OwnShuffle:
    """Data with a state of its own: the generator's from before its permutation, and the position in it."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)
        self.before, self.position = self.generator.get_state(), 0

    def __iter__(self) -> Iterator[int]:
        self.before = self.generator.get_state()
        order = torch.randperm(100, generator=self.generator).tolist()
        while self.position < 100:
            self.position += 1
            yield order[self.position - 1]
        self.position = 0

    def state_dict(self) -> dict:
        return {"before": self.before.tolist(), "position": self.position}

    def load_state_dict(self, state: dict) -> None:
        self.generator.set_state(torch.tensor(state["before"], dtype=torch.uint8))
        self.before, self.position = self.generator.get_state(), state["position"]


KINDS = {
    "own shuffle": OwnShuffle,
    "list": lambda: list(range(100)),
    "DataLoader, global stream": lambda: DataLoader(Samples(), batch_size=None, shuffle=True),
    "DataLoader, own generator": lambda: DataLoader(
        Samples(), batch_size=None, shuffle=True, generator=torch.Generator().manual_seed(8)
    ),
    "DataLoader, DistributedSampler": lambda: DataLoader(
        Samples(), batch_size=None, sampler=DistributedSampler(Samples(), num_replicas=1, rank=0, seed=3)
    ),
    "StatefulDataLoader": lambda: StatefulDataLoader(Samples(), batch_size=None, shuffle=True),
    "StatefulDataLoader, own generator": lambda: StatefulDataLoader(
        Samples(), batch_size=None, shuffle=True, generator=torch.Generator().manual_seed(8)
    ),
}


@pytest.fixture(autouse=True)
def _streams():
    before = RngState().state_dict()
    torch.manual_seed(0)
    yield
    RngState().load_state_dict(before)


def _interrupted(make, taken: int, after: int) -> tuple[list[int], list[int]]:
    """What follows `taken` batches in one go, and after a resume with all random streams, under noise."""
    whole = DataStream(make())
    whole.take(taken)
    torch.rand(3)  # dropout draws in between
    position, streams = copy.deepcopy(whole.state_dict()), RngState().state_dict()
    expected = [int(each) for each in whole.take(after)]

    torch.manual_seed(99)
    resumed = DataStream(make())
    resumed.load_state_dict(position)
    RngState().load_state_dict(streams)
    assert resumed.state_dict() == position or taken == 0
    return expected, [int(each) for each in resumed.take(after)]


@pytest.mark.parametrize("taken", [1, 37, 99, 100, 101, 237])
@pytest.mark.parametrize("kind", KINDS)
def test_f09_the_next_batch_is_the_one_that_followed(kind: str, taken: int) -> None:
    expected, found = _interrupted(KINDS[kind], taken, after=220)
    assert found == expected


@pytest.mark.parametrize("kind", KINDS)
def test_every_epoch_holds_every_sample_once(kind: str) -> None:
    stream = DataStream(KINDS[kind]())
    first, second = stream.take(100), stream.take(100)
    assert sorted(map(int, first)) == sorted(map(int, second)) == list(range(100))
    if kind != "list":
        assert list(map(int, first)) != list(map(int, second))
    assert stream.epoch == 1


def test_workers_position() -> None:
    def make() -> StatefulDataLoader:
        return StatefulDataLoader(Samples(), batch_size=4, shuffle=True, num_workers=1)

    whole = DataStream(make())
    whole.take(7)
    position, streams = copy.deepcopy(whole.state_dict()), RngState().state_dict()
    expected = [batch.tolist() for batch in whole.take(25)]
    resumed = DataStream(make())
    resumed.load_state_dict(position)
    RngState().load_state_dict(streams)
    assert [batch.tolist() for batch in resumed.take(25)] == expected


@pytest.mark.parametrize("kind", KINDS)
def test_the_position_draws_nothing_and_a_load_puts_the_streams_back(kind: str) -> None:
    stream = DataStream(KINDS[kind]())
    stream.take(37)
    streams = RngState().state_dict()
    position = copy.deepcopy(stream.state_dict())
    assert RngState().state_dict() == streams
    fresh = DataStream(KINDS[kind]())
    random.random(), torch.rand(1)
    streams = RngState().state_dict()
    fresh.load_state_dict(position)
    assert RngState().state_dict() == streams


def test_a_position_before_the_first_batch() -> None:
    never = DataStream(OwnShuffle()).state_dict()
    stream = DataStream(OwnShuffle())
    stream.load_state_dict(never)
    assert stream.take(100) == DataStream(OwnShuffle()).take(100)


def test_set_epoch_is_told_on_the_data_or_its_sampler() -> None:
    class Told(list):
        epochs: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    stream = DataStream(Told([1, 2]))
    stream.take(5)
    assert Told.epochs == [0, 1, 2]
    DataStream(Told([1, 2])).load_state_dict(stream.state_dict())
    assert Told.epochs == [0, 1, 2, 2]


@pytest.mark.parametrize("data", [[], iter([1, 2])])
def test_data_that_ends_for_good_is_an_error(data) -> None:
    stream = DataStream(data)
    with pytest.raises(OrlopError, match="yields no batches") as caught:
        stream.take(3)
    assert "epoch" in caught.value.where


@pytest.mark.parametrize(
    "bad", [{}, {"epoch": 0}, None, {"epoch": 0, "batches": "x", "rng": 1, "own_generator": {}, "inner": 1}]
)
def test_what_is_no_position_is_refused(bad) -> None:
    stream = DataStream(OwnShuffle())
    stream.take(3)
    before = stream.state_dict()
    with pytest.raises(CheckpointMismatch) as caught:
        stream.load_state_dict(bad)
    assert caught.value.where == "data"
    assert stream.state_dict() == before


@pytest.mark.parametrize("saved, live", [("own shuffle", "list"), ("list", "own shuffle")])
def test_another_kind_of_data_is_refused(saved: str, live: str) -> None:
    source = DataStream(KINDS[saved]())
    source.take(3)
    stream = DataStream(KINDS[live]())
    with pytest.raises(CheckpointMismatch, match="state_dict") as caught:
        stream.load_state_dict(source.state_dict())
    assert caught.value.where == "data"
    assert stream.batches == 0


def test_data_that_became_shorter_is_refused() -> None:
    source = DataStream(list(range(10)))
    source.take(8)
    with pytest.raises(CheckpointMismatch, match="at least 8 batches"):
        DataStream(list(range(5))).load_state_dict(source.state_dict())
