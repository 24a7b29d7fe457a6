"""What ranks must do alike: arguments, param groups and their values. Otherwise one error, the same on all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import orlop
from orlop import compat
from orlop.errors import CheckpointMismatch, OrlopError, RankFailed
from orlop.testing import run_ranks

SECONDS = 100


def make(order=("weight", "bias"), lr=None):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
    named = list(model.named_parameters())
    groups = [
        {
            "params": [param for name, param in named if name.endswith(kind)],
            "lr": 0.1 if kind == "bias" else 0.2,
        }
        for kind in order
    ]
    optimizer = orlop.SwapAdamW(groups)
    if lr is not None:
        optimizer.param_groups[0]["lr"] = lr
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return orlop.TrainEngine(model, optimizer)


def error_of(act):
    with pytest.raises(CheckpointMismatch) as caught:
        act()
    return str(caught.value)


def load_with_other_arguments(rank, root):
    engine = make()
    engine.save_dcp(root / "x")
    other = make(lr=0.5)
    before = [param.clone() for param in other.model.parameters()]
    texts = [
        error_of(lambda: other.load_dcp(root / "x", load_args=rank == 0)),
        error_of(lambda: other.load_dcp(root / "x", load_states=rank == 0)),
        error_of(lambda: other.load_dcp(root / "x", policy=orlop.LoadPolicy(allow_missing=rank == 0))),
    ]
    unchanged = all(torch.equal(a, b) for a, b in zip(before, other.model.parameters()))
    assert unchanged
    assert other.optimizers["optimizer"].param_groups[0]["lr"] == 0.5
    other.load_dcp(root / "x")
    return texts


def test_a_load_with_other_arguments_on_one_rank_is_refused_and_does_not_hang(tmp_path: Path) -> None:
    texts = run_ranks(load_with_other_arguments, 2, tmp_path, timeout_seconds=SECONDS)
    assert texts[0] == texts[1]
    for name, text in zip(("load_args", "load_states", "allow_missing"), texts[0]):
        assert f"where: {name}, rank 1" in text
        assert "expected: as on rank 0: True" in text


def save_with_other_arguments(rank, root):
    engine = make()
    texts = [
        error_of(lambda: engine.save_dcp(root / f"of_{rank}")),
        error_of(lambda: engine.save_dcp(root / "y", optimizer_layout=("nested", "flattened")[rank])),
    ]
    assert list(root.iterdir()) == []
    return texts


def test_a_save_with_other_arguments_on_one_rank_is_refused(tmp_path: Path) -> None:
    texts = run_ranks(save_with_other_arguments, 2, tmp_path, timeout_seconds=SECONDS)
    assert texts[0] == texts[1]
    assert "of_0" in texts[0][0]
    assert "of_1" in texts[0][0]
    assert "layout, rank 1" in texts[0][1]


class Unlocatable:
    def __fspath__(self):
        raise ValueError("no such place")


def bits(engine):
    return [param.tolist() for param in engine.model.parameters()]


def what_only_one_rank_got_wrong(rank, root):
    """Each call with an argument that is not meant on rank 1 alone; every rank's errors."""
    engine = make()
    engine.save_dcp(root / "x")
    store = orlop.CheckpointStore(root / "run")
    store.save(engine, 1)
    before = bits(engine)
    optimizer = engine.optimizers["optimizer"]

    def wrong(value, right):
        return value if rank == 1 else right

    def save(path=root / "never", **options):
        engine.save_dcp(path, **options)

    def load(path=root / "x", **options):
        engine.load_dcp(path, **options)

    def trainer(store=store, data=((1,),), total_steps=9, **options):
        orlop.Trainer(engine, store, data, total_steps=total_steps, save_every=3, **options)

    calls = {
        "weights_dir must be a path": lambda: save(wrong(3, root / "never")),
        "no such place": lambda: save(wrong(Unlocatable(), root / "never")),
        "was an address before": lambda: save(wrong(Path("s3://a/b"), root / "never")),
        "save_optimizer must be True or False": lambda: save(save_optimizer=wrong("no", True)),
        "include_frozen must be": lambda: save(include_frozen=wrong(1, True)),
        "materialize_absent must be": lambda: save(materialize_absent=wrong(None, True)),
        "optimizer_layout is one of": lambda: save(optimizer_layout=wrong("flat", "nested")),
        "key_prefix must be a string; it is 3": lambda: save(key_prefix=wrong(3, "")),
        "weights_dir must be a path: ": lambda: load(wrong(None, root / "x")),
        "load_states must be": lambda: load(load_states=wrong("yes", True)),
        "load_args must be": lambda: load(load_args=wrong(0, False)),
        "policy must be a LoadPolicy": lambda: load(policy=wrong({}, None)),
        "key_prefix must be a string; it is None": lambda: load(key_prefix=wrong(None, "")),
        "step must be an int": lambda: store.save(engine, wrong("2", 2)),
        "step must be at least 0": lambda: store.save(engine, wrong(-1, 2)),
        "fingerprint must be": lambda: store.save(engine, 2, fingerprint=wrong("x", True)),
        "step must be an int; it is 1.0": lambda: store.resume(engine, step=wrong(1.0, 1)),
        "policy must be a LoadPolicy, ": lambda: store.resume(engine, policy=wrong(True, None)),
        "load_states must be True": lambda: store.resume(engine, load_states=wrong(None, True)),
        "the first argument is the model": lambda: orlop.TrainEngine(wrong(None, engine.model), optimizer),
        "the second argument is an optimizer": lambda: orlop.TrainEngine(engine.model, wrong(1, optimizer)),
        "parts must be a mapping": lambda: orlop.TrainEngine(engine.model, optimizer, parts=wrong([1], {})),
        "max_grad_norm must be": lambda: orlop.TrainEngine(
            engine.model, optimizer, max_grad_norm=wrong(-1, 1)
        ),
        "a part or optimizer can't be named 'model'": lambda: orlop.TrainEngine(
            engine.model, optimizer, parts={wrong("model", "mine"): optimizer}
        ),
        "total_steps must be an int": lambda: trainer(total_steps=wrong("9", 9)),
        "data must be iterable": lambda: trainer(data=wrong(3, [])),
        "root must be a path": lambda: trainer(store=wrong(3, store)),
        "resume must be": lambda: trainer(resume=wrong(3, None)),
    }
    errors = []
    for act in calls.values():
        with pytest.raises(OrlopError) as caught:
            act()
        errors.append((type(caught.value).__name__, str(caught.value)))
    assert bits(engine) == before
    assert sorted(path.name for path in root.iterdir()) == ["run", "x"]
    assert store.steps() == [1]
    # All go on together.
    engine.load_dcp(root / "x")
    store.save(engine, 2)
    return list(zip(calls, errors))


def test_c8_an_argument_that_one_rank_got_wrong_is_every_ranks_error_and_none_waits(tmp_path: Path) -> None:
    first, second = run_ranks(what_only_one_rank_got_wrong, 2, tmp_path, timeout_seconds=SECONDS)
    assert first == second
    for said, (kind, text) in first:
        assert kind == "RankFailed", text
        assert "where: rank 1\n" in text
        assert said.rstrip(": ,") in text


def groups_in_another_order(rank, root):
    order = ("weight", "bias") if rank == 0 else ("bias", "weight")
    texts = [
        error_of(lambda: make(order).save_dcp(root / "nested")),
        error_of(lambda: make(order).save_dcp(root / "flattened", optimizer_layout="flattened")),
    ]
    assert list(root.iterdir()) == []
    make().save_dcp(root / "good")
    return [*texts, error_of(lambda: make(order).load_dcp(root / "good"))]


def test_a11_groups_in_another_order_on_one_rank_are_refused(tmp_path: Path) -> None:
    texts = run_ranks(groups_in_another_order, 2, tmp_path, timeout_seconds=SECONDS)
    assert texts[0] == texts[1]
    for text in texts[0]:
        assert "ranks have a parameter in different param groups" in text
        assert "expected: group 1, as on rank 0" in text
        assert "optimizer, 0.bias, rank 1" in text


def other_rate(rank, root):
    engine = make(lr=0.1 * (rank + 1))
    text = error_of(lambda: engine.save_dcp(root / "x"))
    assert list(root.iterdir()) == []
    engine.optimizers["optimizer"].param_groups[0]["lr"] = 0.3
    engine.save_dcp(root / "x")
    return text


def test_a_learning_rate_of_one_rank_alone_is_refused_at_the_save(tmp_path: Path) -> None:
    texts = run_ranks(other_rate, 2, tmp_path, timeout_seconds=SECONDS)
    assert texts[0] == texts[1]
    assert "optimizer.param_groups.0.lr, rank 1" in texts[0]
    assert "0.1, as on rank 0" in texts[0]
    assert "found: 0.2" in texts[0]


class LocalMoments(torch.optim.Optimizer):
    """Keeps its state for this rank's part as a plain tensor, as quantising optimizers do."""

    def __init__(self, params, same=False):
        super().__init__(params, {"lr": 0.1})
        self.same = same

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            part = param.to_local()
            fill = 1.0 if self.same else 1.0 + torch.distributed.get_rank()
            self.state[param]["moment"] = torch.full_like(part, fill)
            part.sub_(0.1 * self.state[param]["moment"])


def with_local_moments(same):
    mesh = init_device_mesh("cpu", (2,))
    like = DTensor.from_local(torch.zeros(2, 2), mesh, [Shard(0)])
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(compat.shard_like(like, torch.arange(8.0).reshape(4, 2)))
    optimizer = LocalMoments(model.parameters(), same)
    optimizer.step()
    return orlop.TrainEngine(model, optimizer)


def save_local_moments(rank, root):
    with_local_moments(same=True).save_dcp(root / "same")
    text = error_of(lambda: with_local_moments(same=False).save_dcp(root / "own"))
    assert [path.name for path in root.iterdir()] == ["same"]
    return text


def test_d04_plain_state_of_each_ranks_own_for_a_sharded_parameter_is_refused(tmp_path: Path) -> None:
    texts = run_ranks(save_local_moments, 2, tmp_path, timeout_seconds=SECONDS)
    assert texts[0] == texts[1]
    assert "replica content differs" in texts[0]
    assert "optimizer.state.weight.moment" in texts[0]
    assert "other content on rank 1" in texts[0]


def nearly_equal_rates(rank, root):
    engine = make(lr=torch.tensor(1e-3 if rank == 0 else 1.00001e-3))
    return error_of(lambda: engine.save_dcp(root / "x"))


def test_rates_that_are_tensors_are_compared_by_their_bits(tmp_path: Path) -> None:
    texts = run_ranks(nearly_equal_rates, 2, tmp_path, timeout_seconds=SECONDS)
    assert texts[0] == texts[1]
    assert "found: 0.00100000994" in texts[0]


def with_a_part_of_one_rank(rank):
    model = torch.nn.Linear(2, 2)
    parts = {"loader": object()} if rank == 1 else {}
    with pytest.raises(OrlopError) as caught:
        orlop.TrainEngine(model, orlop.SwapAdamW(model.parameters()), parts=parts)
    return str(caught.value)


def test_an_engine_that_one_rank_can_not_build_is_every_ranks_error() -> None:
    texts = run_ranks(with_a_part_of_one_rank, 2, timeout_seconds=SECONDS)
    assert texts[0] == texts[1]
    assert "rank 1" in texts[0]
    assert "loader" in texts[0]


def save_alone(rank, root):
    engine = make()
    if rank == 1:
        torch.distributed.destroy_process_group()
        return "left"
    with pytest.raises(RankFailed) as caught:
        engine.save_dcp(root / "x")
    return str(caught.value)


def test_a_rank_that_left_before_a_save_is_said_to_the_others(tmp_path: Path) -> None:
    texts = run_ranks(save_alone, 2, tmp_path, timeout_seconds=SECONDS)
    assert texts[1] == "left"
    assert "a rank went away; could not save" in texts[0]
