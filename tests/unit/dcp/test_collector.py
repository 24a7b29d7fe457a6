"""Python's garbage collector stays out of saves and loads, and is always given back."""

import gc
from contextlib import contextmanager

import pytest
import torch
import torch.distributed.checkpoint as dcp

from orlop import TrainEngine
from orlop.dcp import Reader, Writer
from orlop.dcp.collector import without_collection


@contextmanager
def collections():
    """Counts the collections within the block; any some hundred objects set one off."""
    seen, before = [], gc.get_threshold()

    def note(phase, info):
        if phase == "start":
            seen.append(info["generation"])

    gc.callbacks.append(note)
    gc.set_threshold(300, 2, 2)
    try:
        yield seen
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(note)


def test_f14_no_collection_while_an_engine_saves(tmp_path):
    model = torch.nn.ParameterList(torch.ones(3) for _ in range(300))
    engine = TrainEngine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with collections() as seen:
        engine.save_dcp(tmp_path / "x")
    assert len(seen) <= 3  # just before it and just after
    assert gc.isenabled()


def test_f14_no_collection_while_the_reader_fills_targets(tmp_path):
    state = {f"w{i}": torch.ones(3) for i in range(300)}
    dcp.save(state, storage_writer=Writer(tmp_path / "x"))
    reader, counts = Reader(tmp_path / "x"), []
    with collections() as seen:

        class Counted(dcp.DefaultLoadPlanner):
            def resolve_tensor(self, read_item):
                counts.append(len(seen))
                return super().resolve_tensor(read_item)

            def commit_tensor(self, read_item, tensor):
                counts.append(len(seen))

        dcp.load({key: torch.zeros(3) for key in state}, storage_reader=reader, planner=Counted())
    assert len(counts) == 600
    assert counts[0] == counts[-1]
    assert len(seen) > 0  # torch's own planning
    assert gc.isenabled()


def test_the_collector_is_given_back_after_an_error_and_left_alone_where_it_was_off(tmp_path):
    @without_collection()
    def fail():
        assert not gc.isenabled()
        raise ValueError

    with pytest.raises(ValueError):
        fail()
    assert gc.isenabled()
    gc.disable()
    try:
        with without_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
