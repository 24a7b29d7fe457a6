"""Parts that one side lacks, that do not fit, or that a policy misspells: said in one error, or one warning."""

import logging
from collections import Counter

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.optim import lr_scheduler

from orlop import CheckpointStore, LoadPolicy, RngState, SwapAdamW, TrainEngine
from orlop.errors import CheckpointMismatch
from orlop.state.data import DataStream

BATCH = torch.arange(6.0).view(2, 3)


def make(*, scheduler=True, seed=0, **parts):
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    optimizer = SwapAdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2) if scheduler else None
    return TrainEngine(model, optimizer, schedule, parts)


def trained(**options):
    engine = make(**options)
    engine.train_step([BATCH], lambda model, batch: model(batch).square().mean())
    engine.step_optimizer(engine.clip_grad_norm())
    return engine


def snapshot(engine):
    engine.optimizers["optimizer"].synchronize()
    tensors = [param.detach().clone() for param in engine.model.parameters()]
    state = engine.optimizers["optimizer"].state
    tensors += [value.clone() for entry in state.values() for value in entry.values()]
    return tensors, engine.optimizers["optimizer"].param_groups[0]["lr"], torch.get_rng_state()


def assert_unchanged(engine, before):
    tensors, lr, stream = snapshot(engine)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before[0], strict=True))
    assert lr == before[1]
    assert torch.equal(stream, before[2])
    engine.require_ready()


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "orlop"]


def test_a_part_that_nothing_takes_is_warned_of_once_and_can_be_skipped(tmp_path, caplog):
    trained().save_dcp(tmp_path / "x")
    caplog.set_level(logging.WARNING, logger="orlop")
    report = make(scheduler=False).load_dcp(tmp_path / "x")
    assert [finding.leaf for finding in report.of("ignored")] == ["scheduler"]
    assert warnings(caplog) == [
        "parts of the checkpoint that nothing here takes stay there: scheduler "
        "(give them to the engine, or leave them by LoadPolicy(skip_parts=...))"
    ]
    caplog.clear()
    for policy in (LoadPolicy(skip_parts={"scheduler"}), LoadPolicy(allow_unexpected=True)):
        make(scheduler=False).load_dcp(tmp_path / "x", policy=policy)
    assert warnings(caplog) == []


def test_what_another_prefix_holds_is_listed_and_not_warned_of(tmp_path, caplog):
    first, other = trained(), trained(seed=1)
    leaves = {"a": {"model": first.model.state_dict()}, "b": {"model": other.model.state_dict()}}
    dcp.save(leaves, checkpoint_id=tmp_path / "x")
    caplog.set_level(logging.WARNING, logger="orlop")
    policy = LoadPolicy(skip_parts={"scheduler"})
    report = make(seed=2).load_dcp(tmp_path / "x", load_states=False, policy=policy, key_prefix="a.")
    assert [(f.leaf, f.detail) for f in report.of("ignored")] == [("b", "2 leaves under another key prefix")]
    assert not any("nothing here takes" in text for text in warnings(caplog))


def test_a_run_does_not_go_on_by_itself_without_a_part_that_it_had(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(trained(rng=RngState()), 1)
    other = make(scheduler=False, seed=1)
    before = snapshot(other)
    with pytest.raises(CheckpointMismatch, match="2 unexpected part") as caught:
        store.resume(other)
    assert_unchanged(other, before)
    assert "unexpected part: scheduler (1 leaf of a part that is not here)" in caught.value.found
    assert caught.value.where == str(tmp_path / "step-00000001")
    assert caught.value.todo == (
        "give the engine the part that it was saved with; to leave these parts as they are here: "
        "LoadPolicy(skip_parts={'rng', 'scheduler'}); "
        "a LoadPolicy is given as policy= to load_dcp, CheckpointStore.resume or Trainer"
    )
    for policy in (LoadPolicy(skip_parts={"rng", "scheduler"}), LoadPolicy(allow_unexpected=True)):
        assert store.resume(make(scheduler=False), policy=policy).step == 1


def test_a_name_to_skip_that_nobody_knows_is_an_error(tmp_path):
    trained(rng=RngState()).save_dcp(tmp_path / "x")
    other = make(rng=RngState(), seed=1)
    for name in ("rgn", "optimizer"):
        before = snapshot(other)
        with pytest.raises(CheckpointMismatch, match="1 no part") as caught:
            other.load_dcp(tmp_path / "x", policy=LoadPolicy(skip_parts={name}))
        assert_unchanged(other, before)
        assert f"no part: {name} (skip_parts names it, and it is no such part here (scheduler, rng)" in (
            caught.value.found
        )
    # orlop's own names may stand in a policy that several runs share.
    other.load_dcp(tmp_path / "x", policy=LoadPolicy(skip_parts={"data"}))


class Counted(list):
    """Data whose length follows the epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return super().__len__() if self.epoch else 2


def test_data_that_is_too_short_is_refused_before_anything_changes(tmp_path):
    first = trained(data=DataStream(list(range(10))), rng=RngState())
    first.parts["data"].take(8)
    first.save_dcp(tmp_path / "x")
    other = make(data=DataStream(list(range(5))), rng=RngState(), seed=1)
    before = snapshot(other)
    with pytest.raises(CheckpointMismatch, match="1 unfit") as caught:
        other.load_dcp(tmp_path / "x")
    assert_unchanged(other, before)
    assert "unfit: data (expected at least 8 batches in epoch 0, found 5)" in caught.value.found
    assert "LoadPolicy(skip_parts={'data'})" in caught.value.todo
    assert other.parts["data"].take(2) == [0, 1]


def test_a_length_that_follows_the_epoch_is_asked_for_that_epoch():
    source = DataStream(Counted(range(6)))
    source.take(10)
    data = Counted(range(6))
    stream = DataStream(data)
    assert stream.check_state_dict(source.state_dict()) == ""
    assert data.epoch == 0
    stream.load_state_dict(source.state_dict())
    assert stream.take(2) == [4, 5]


def test_random_streams_that_cannot_be_restored_are_refused_before_anything_changes(tmp_path):
    trained(rng=RngState({"mine": torch.Generator()})).save_dcp(tmp_path / "x")
    other = make(rng=RngState(), seed=1)
    before = snapshot(other)
    with pytest.raises(CheckpointMismatch, match="1 unfit") as caught:
        other.load_dcp(tmp_path / "x")
    assert_unchanged(other, before)
    assert "unfit: rng" in caught.value.found


def test_an_optimizer_that_only_the_checkpoint_has_is_missed_however_it_is_loaded(tmp_path):
    def two(names):
        torch.manual_seed(0)
        model = nn.ModuleDict({name: nn.Linear(2, 2) for name in "ab"})
        return TrainEngine(model, {name: SwapAdamW(model[name].parameters()) for name in names})

    two("ab").save_dcp(tmp_path / "x")
    engine = two("a")
    before = [param.detach().clone() for param in engine.model.parameters()]
    with pytest.raises(CheckpointMismatch, match=r"unexpected part: b \("):
        engine.load_dcp(tmp_path / "x")
    assert all(torch.equal(a, b) for a, b in zip(before, engine.model.parameters()))
    for options in ({"policy": LoadPolicy(skip_parts={"b"})}, {"load_states": False}):
        report = engine.load_dcp(tmp_path / "x", **options)
        assert [found.leaf for found in report.of("ignored", "skipped")][-1] == "b"
    # Who has no optimizer at all wants none.
    TrainEngine(engine.model, {}).load_dcp(tmp_path / "x")


def test_a_part_that_is_here_and_skipped_is_warned_of_at_every_load(tmp_path, caplog):
    trained().save_dcp(tmp_path / "x")
    caplog.set_level(logging.WARNING, logger="orlop")
    engine = make()
    for _ in range(2):
        report = engine.load_dcp(tmp_path / "x", policy=LoadPolicy(skip_parts={"scheduler"}))
        assert [found.leaf for found in report.of("skipped")] == ["scheduler"]
    assert [text for text in warnings(caplog) if "skipped" in text] == [
        "1 part is skipped, as the policy says: what is here stays: scheduler"
    ] * 2


class Held:
    """A part that is its state."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def save_by_torch(engine, path, **parts):
    (optimizer,) = engine.optimizers.values()
    model, state = get_state_dict(engine.model, optimizer)
    dcp.save({"model": model, "optimizer": state, **parts}, checkpoint_id=path)


SCHEDULES = {
    "steps": lambda o: lr_scheduler.MultiStepLR(o, [4, 6], 0.1),
    "chained": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 2), lr_scheduler.MultiStepLR(o, [2, 4], 0.1)], [2]
    ),
}


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=list(SCHEDULES))
def test_milestones_in_a_file_of_torchs_are_numbers_and_the_rate_drops_at_them(tmp_path, schedule):
    def make(seed):
        torch.manual_seed(seed)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        return TrainEngine(model, optimizer, schedule(optimizer))

    def rates(engine, steps):
        (optimizer,) = engine.optimizers.values()
        found = []
        for _ in range(steps):
            optimizer.step()
            engine.scheduler.step()
            found.append(optimizer.param_groups[0]["lr"])
        return found

    first, second = make(0), make(1)
    rates(first, 3)
    save_by_torch(first, tmp_path / "x", scheduler=first.scheduler.state_dict())
    second.load_dcp(tmp_path / "x")
    inner = getattr(second.scheduler, "_schedulers", [second.scheduler])[-1]
    assert type(inner.milestones) is Counter
    assert sorted(inner.milestones) in ([4, 6], [2, 4])
    expected = rates(first, 6)
    assert len(set(expected)) > 1
    assert rates(second, 6) == expected


def test_a_part_in_a_file_of_torchs_comes_back_with_its_keys_and_empty_dicts(tmp_path):
    state = {"z": 1, "stages": {2: 0.5, 10: {}}, "seen": Counter({3: 1}), "a": [{}, {1: torch.ones(1)}]}
    save_by_torch(trained(), tmp_path / "x", mine=state)
    live = {"z": 0, "stages": {2: 0.0, 10: {}}, "seen": Counter({4: 2}), "a": [{}, {1: torch.zeros(1)}]}
    other = make(scheduler=False, seed=1, mine=Held(live))
    other.load_dcp(tmp_path / "x")
    found = other.parts["mine"].state
    assert found == state
    assert list(found) == list(state)
    assert type(found["seen"]) is Counter


@pytest.mark.parametrize("live", [{"stages": {}}, {}, None], ids=str)
def test_a_part_whose_keys_nothing_tells_is_refused_before_anything_changes(tmp_path, live):
    save_by_torch(trained(), tmp_path / "x", mine={"stages": {1: 0.5}})
    other = make(scheduler=False, seed=1, mine=Held(live))
    before = snapshot(other)
    with pytest.raises(CheckpointMismatch, match="1 unfit") as caught:
        other.load_dcp(tmp_path / "x")
    assert_unchanged(other, before)
    assert other.parts["mine"].state is live
    assert "unfit: mine (mine['stages']: DCP writes every key as text" in caught.value.found
    other.load_dcp(tmp_path / "x", policy=LoadPolicy(skip_parts={"mine"}))
    assert other.parts["mine"].state is live


def test_an_optimizer_as_a_part_takes_its_state_from_a_file_of_torchs(tmp_path):
    def make_part():
        parameter = nn.Parameter(torch.ones(2))
        return parameter, torch.optim.AdamW([parameter])

    parameter, source = make_part()
    parameter.grad = torch.ones(2)
    source.step()
    save_by_torch(trained(), tmp_path / "x", other=source.state_dict())
    parameter, part = make_part()
    make(scheduler=False, seed=1, other=part).load_dcp(tmp_path / "x")
    assert part.state[parameter]["step"] == 1
