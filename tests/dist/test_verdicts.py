"""Verdicts that take several ranks: state on some of them only, shards that are no boxes, regions nobody saved."""

import logging
import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from orlop import swap
from orlop.engine import TrainEngine
from orlop.errors import OrlopError
from orlop.resume import LoadPolicy
from orlop.store.manifest import read_manifest
from orlop.testing import run_ranks

pytestmark = pytest.mark.dist


def _local(tensor):
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _snapshot(engine):
    """This rank's part of the model and of all state, by name."""
    values = {name: _local(value).clone() for name, value in engine.model.state_dict().items()}
    names = {param: name for name, param in engine.model.named_parameters()}
    for optimizer in engine.optimizers.values():
        for param, state in optimizer.state.items():
            for key, value in state.items():
                values[f"{names[param]}.{key}"] = _local(value).clone()
    return values


def _same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def _refused(act, engine=None):
    """Type and text of the error, after which the engine is as it was."""
    before = None if engine is None else _snapshot(engine)
    try:
        act()
    except OrlopError as error:
        if before is not None:
            _same(before, _snapshot(engine))
        return type(error).__name__, str(error)
    raise AssertionError("nothing was raised")


# -- experts that got no token -------------------------------------------------------------------------------


class Experts(nn.Module):
    """Four experts in one stacked parameter, spread over ranks, and a parameter that all ranks share."""

    def __init__(self, mesh):
        super().__init__()
        self.experts = nn.Parameter(distribute_tensor(torch.randn(4, 3), mesh, [Shard(0)]))
        self.shared = nn.Parameter(distribute_tensor(torch.randn(3), mesh, [Replicate()]))


def _experts(kind, seed=0, optimizer_class=torch.optim.AdamW, **options):
    torch.manual_seed(seed)
    model = Experts(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",)))
    cls = swap(optimizer_class) if kind == "swapped" else optimizer_class
    return TrainEngine(model, cls(model.parameters(), **{"lr": 1e-2, **options}))


def _step(engine, *, expert_gradient):
    """One step; where `expert_gradient` is false this rank's experts got no token."""
    model = engine.model
    model.shared.grad = torch.full_like(model.shared, 0.5)
    model.experts.grad = torch.full_like(model.experts, 0.25) if expert_gradient else None
    engine.step_optimizer(1.0)


def _uneven_round_trip(rank, folder, kind, optimizer_class, options):
    def run(engine, steps):
        for step in steps:
            # Rank 1 gets its first tokens in step 4; rank 0 none in step 1.
            _step(engine, expert_gradient=step >= 4 if rank == 1 else step != 1)

    first = _experts(kind, optimizer_class=optimizer_class, **options)
    run(first, range(3))
    first.save_dcp(f"{folder}/x")
    second = _experts(kind, seed=5, optimizer_class=optimizer_class, **options)
    report = second.load_dcp(f"{folder}/x")
    _same(_snapshot(first), _snapshot(second))
    for engine in (first, second):
        run(engine, range(3, 6))
    _same(_snapshot(first), _snapshot(second))
    # Now all have state, after other numbers of steps.
    first.save_dcp(f"{folder}/later")
    third = _experts(kind, seed=8, optimizer_class=optimizer_class, **options)
    assert not third.load_dcp(f"{folder}/later").of("absent")
    _same(_snapshot(first), _snapshot(third))
    return [finding.leaf for finding in report.of("absent")]


def _load_uneven(rank, folder, kind):
    engine = _experts(kind, seed=7)
    refused = _refused(lambda: engine.load_dcp(f"{folder}/x"), engine)
    reset = engine.load_dcp(f"{folder}/x", policy=LoadPolicy(reset_damaged=("experts",)))
    assert not engine.optimizers["optimizer"].state.get(engine.model.experts, {}).get("step")
    merged = engine.load_dcp(f"{folder}/x", policy=LoadPolicy(merge_uneven=True))
    state = engine.optimizers["optimizer"].state[engine.model.experts]
    return (
        refused,
        [finding.leaf for finding in reset.of("reset")],
        [finding.leaf for finding in merged.of("merged")],
        state["step"].item(),
        state["exp_avg"].full_tensor(),
    )


@pytest.mark.parametrize("kind", ["stock", "swapped"])
def test_experts_without_tokens_are_saved_whole_and_each_rank_gets_its_own_back(tmp_path, kind):
    arguments = (str(tmp_path), kind, torch.optim.AdamW, {})
    assert run_ranks(_uneven_round_trip, 2, *arguments) == [[], ["optimizer.state.experts"]]
    record = read_manifest(tmp_path / "x").uneven["optimizer"]["experts"]
    assert record.ranks == [{"step": 2.0}, None]
    assert record.layout == "ep=2: Shard(0)"
    later = read_manifest(tmp_path / "later").uneven["optimizer"]["experts"]
    assert later.ranks == [{"step": 5.0}, {"step": 2.0}]
    # Plain DCP finds the tensor whole, with initial values where there was no state, and the step of those that had it.
    plain = {
        "optimizer.state.experts.exp_avg": torch.ones(4, 3),
        "optimizer.state.experts.step": torch.ones(()),
    }
    dcp.load(plain, checkpoint_id=tmp_path / "x")
    assert not plain["optimizer.state.experts.exp_avg"][2:].any()
    assert plain["optimizer.state.experts.exp_avg"][:2].all()
    assert plain["optimizer.state.experts.step"] == 2
    # One rank has one step for all of them: nothing is picked in silence.
    ((refused, reset, merged, step, moment),) = run_ranks(_load_uneven, 1, str(tmp_path), kind)
    assert refused[0] == "CheckpointMismatch"
    assert "uneven: optimizer.state.experts" in refused[1]
    assert "rank 0: {'step': 2.0}; rank 1: no state" in refused[1]
    assert "LoadPolicy(merge_uneven=True)" in refused[1]
    assert reset == merged == ["optimizer.state.experts"]
    assert step == 2
    assert torch.equal(moment, plain["optimizer.state.experts.exp_avg"])


@pytest.mark.parametrize("kind", ["stock", "swapped"])
def test_state_that_no_constant_begins_is_absent_again_where_it_was(tmp_path, kind):
    arguments = (str(tmp_path), kind, torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5})
    assert run_ranks(_uneven_round_trip, 2, *arguments) == [[], ["optimizer.state.experts"]]


def _uneven_elsewhere(rank, folder):
    engine = _experts("stock")
    _step(engine, expert_gradient=rank == 0)
    writer = FileSystemWriter(f"{folder}/x")
    return _refused(lambda: engine.save_dcp("unused", storage_writer=writer), engine)


def test_what_differs_by_rank_is_not_saved_where_it_can_not_be_recorded(tmp_path):
    for kind, text in run_ranks(_uneven_elsewhere, 2, str(tmp_path)):
        assert kind == "CheckpointMismatch"
        assert "optimizer.state.experts" in text
    assert not os.path.exists(tmp_path / "x" / ".metadata")


def _different_replicas(rank, folder):
    engine = _experts("stock")
    for _ in range(1 + rank):
        _step(engine, expert_gradient=True)
    return _refused(lambda: engine.save_dcp(f"{folder}/x"), engine)


def test_replicas_with_different_state_are_refused_on_all_ranks(tmp_path):
    for kind, text in run_ranks(_different_replicas, 2, str(tmp_path)):
        assert kind == "CheckpointMismatch"
        assert "optimizer.state.shared" in text
        assert "on rank 1: {'step': 2.0}" in text
    assert os.listdir(tmp_path) == []


def _own_tensors(rank, folder):
    """D04: a plain tensor of each rank's own, under one name, with another shape on each."""
    model = nn.Module()
    model.mine = nn.Parameter(torch.ones(2 + rank))
    engine = TrainEngine(model, torch.optim.SGD(model.parameters()))
    return _refused(lambda: engine.save_dcp(f"{folder}/x"), engine)


def test_d04_plain_tensors_that_differ_in_shape_are_refused(tmp_path):
    for kind, text in run_ranks(_own_tensors, 2, str(tmp_path)):
        assert kind == "CheckpointMismatch"
        assert "model.mine" in text
        assert "on rank 1: shape (3,)" in text
    assert os.listdir(tmp_path) == []


# -- shards that are not boxes, and regions that nobody saved ------------------------------------------------


def _sharded(values, placement, mesh=None):
    mesh = mesh if mesh is not None else init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Module()
    model.w = nn.Parameter(distribute_tensor(values, mesh, [placement] if mesh.ndim == 1 else placement))
    return TrainEngine(model, torch.optim.AdamW(model.parameters()))


def _interleaved(rank, folder):
    strided = _sharded(torch.arange(8.0).reshape(8, 1), _StridedShard(0, split_factor=2))
    saved = _refused(lambda: strided.save_dcp(f"{folder}/strided"), strided)
    _sharded(torch.ones(8, 1), Shard(0)).save_dcp(f"{folder}/x")
    loaded = _refused(lambda: strided.load_dcp(f"{folder}/x"), strided)
    return saved, loaded


def test_interleaved_shards_are_refused_by_name_and_never_saved_wrong(tmp_path):
    for results in run_ranks(_interleaved, 2, str(tmp_path)):
        for kind, text in results:
            assert kind == "CheckpointMismatch"
            assert "model.w: dim0=2" in text
            assert "rows [0, 1, 4, 5] of axis 0" in text
    assert os.listdir(tmp_path) == ["x"]


def _two_dimensional(rank, folder):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    values = torch.arange(16.0).reshape(8, 2)
    engine = _sharded(values, [_StridedShard(0, split_factor=2), Shard(0)], mesh)
    engine.save_dcp(f"{folder}/x")
    other = _sharded(torch.zeros(8, 2), [_StridedShard(0, split_factor=2), Shard(0)], mesh)
    other.load_dcp(f"{folder}/x")
    whole = {"model.w": torch.zeros(8, 2)}
    dcp.load(whole, checkpoint_id=f"{folder}/x")
    return torch.equal(_local(other.model.w), _local(engine.model.w)) and torch.equal(
        whole["model.w"], values
    )


def test_strided_shards_that_are_one_box_per_rank_round_trip(tmp_path):
    """What fully_shard over tensor parallelism makes."""
    assert run_ranks(_two_dimensional, 4, str(tmp_path)) == [True] * 4


class Holed(FileSystemReader):
    """A checkpoint in which rank 1's chunk of a tensor was never written."""

    def read_metadata(self, *args, **kwargs):
        metadata = super().read_metadata(*args, **kwargs)
        metadata.state_dict_metadata["model.w"].chunks.pop()
        return metadata


def _hole(rank, folder):
    _sharded(torch.ones(5, 2), Shard(0)).save_dcp(f"{folder}/x")
    other = _sharded(torch.zeros(5, 2), Shard(0))
    return _refused(lambda: other.load_dcp("", storage_reader=Holed(f"{folder}/x")), other)


def test_a_region_that_no_rank_saved_is_named_with_the_ranks_that_need_it(tmp_path):
    for kind, text in run_ranks(_hole, 2, str(tmp_path)):
        assert kind == "CheckpointIncomplete"
        assert "uncovered: model.w" in text
        assert "not covered: (2, 2) at (3, 0); needed by rank 1" in text
        assert "rank 0" not in text


def _plain_shard(rank, folder):
    """An old save that wrote `to_local()`: DCP took the shards for replicas and kept rank 0's."""
    engine = _sharded(torch.arange(8.0).reshape(4, 2), Shard(0))
    dcp.save({"model": {"w": engine.model.w.to_local().detach()}}, checkpoint_id=f"{folder}/x")
    other = _sharded(torch.zeros(4, 2), Shard(0))
    return _refused(lambda: other.load_dcp(f"{folder}/x"), other)


def test_one_ranks_shard_that_was_saved_as_a_plain_tensor_has_its_own_message(tmp_path):
    for kind, text in run_ranks(_plain_shard, 2, str(tmp_path)):
        assert kind == "CheckpointMismatch"
        assert "shape: model.w (expected (4, 2), found (2, 2)" in text
        assert "saved as a plain tensor rather than a DTensor" in text


# -- adapters ------------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen base and a small adapter; fewer rows than ranks in one of its parameters."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(64, 64)
        self.base.requires_grad_(False)
        self.down = nn.Linear(64, 2, bias=False)
        self.up = nn.Linear(2, 64, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def _adapted(seed):
    torch.manual_seed(seed)
    model = Adapted()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    params = [param for param in model.parameters() if param.requires_grad]
    return TrainEngine(model, torch.optim.AdamW(params, lr=1e-2))


def _whole(engine):
    optimizer = engine.optimizers["optimizer"]
    values = {name: param.full_tensor().detach() for name, param in engine.model.named_parameters()}
    for name, param in engine.model.named_parameters():
        for key in ("exp_avg", "exp_avg_sq") if param in optimizer.state else ():
            values[f"{name}.{key}"] = optimizer.state[param][key].full_tensor()
    return values


def _save_adapter(rank, folder):
    engine = _adapted(0)
    for step in range(2):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(step))
        engine.train_step([x], lambda model, batch: model(batch).square().mean())
        engine.step_optimizer(engine.clip_grad_norm())
    engine.save_dcp(f"{folder}/x", include_frozen=False)
    return _whole(engine)


def _load_adapter(rank, folder):
    engine = _adapted(3)
    base = _whole(engine)["base.weight"]
    report = engine.load_dcp(f"{folder}/x")
    values = _whole(engine)
    assert torch.equal(values["base.weight"], base)
    return values, sorted(finding.leaf for finding in report.of("left out")), set(report.counts)


@pytest.mark.fsdp
def test_f11_adapters_are_saved_without_their_base_and_resume_strictly_on_other_ranks(tmp_path):
    (first, _) = run_ranks(_save_adapter, 2, str(tmp_path))
    adapter = sum(value.nbytes for name, value in first.items() if not name.startswith("base."))
    size = sum(path.stat().st_size for path in (tmp_path / "x").glob("*.distcp"))
    assert adapter < size < adapter + 40_000  # what DCP adds to each record
    for values, left_out, counts in run_ranks(_load_adapter, 3, str(tmp_path)):
        assert left_out == ["model.base.bias", "model.base.weight"]
        assert counts == {"loaded", "left out"}
        for name in first:
            assert name.startswith("base.") or torch.equal(values[name], first[name]), name


# -- groups, and decisions that must not depend on the shard -------------------------------------------------


def _grouped(sharded):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    groups = [
        {"params": model[0].parameters(), "lr": 0.01, "weight_decay": 0.1},
        {"params": model[1].parameters(), "lr": 0.03, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups if not sharded else [{**group, "lr": 0.5} for group in groups])
    return TrainEngine(model, optimizer, skip_grad_norm_threshold=1.0)


def _save_grouped(rank, folder):
    engine = _grouped(sharded=False)
    engine.train_step([torch.ones(2, 5)], lambda model, batch: model(batch).square().mean())
    engine.step_optimizer(0.5)
    engine.save_dcp(f"{folder}/x")
    return _snapshot(engine)


def _load_grouped(rank, folder):
    engine = _grouped(sharded=True)
    engine.load_dcp(f"{folder}/x")
    (optimizer,) = engine.optimizers.values()
    values = {}
    for name, param in engine.model.named_parameters():
        state = optimizer.state[param]
        assert state["exp_avg"].placements == param.placements
        assert (type(state["step"]), state["step"].shape, state["step"].dtype) == (
            torch.Tensor,
            (),
            torch.float32,
        )
        values[name] = state["exp_avg"].full_tensor()
    return [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups], values


def test_a13_every_rank_gets_all_groups_and_moments_as_its_parameters_are(tmp_path):
    (saved,) = run_ranks(_save_grouped, 1, str(tmp_path))
    for groups, moments in run_ranks(_load_grouped, 2, str(tmp_path)):
        assert groups == [(0.01, 0.1), (0.03, 0.0)]
        assert all(torch.equal(moment, saved[f"{name}.exp_avg"]) for name, moment in moments.items())


def _threshold(rank):
    engine = _grouped(sharded=True)
    taken = []
    for norm in (0.9, 1.1):
        for param in engine.model.parameters():
            param.grad = torch.full_like(param, norm / 26**0.5)  # the model has 26 elements
        taken.append(engine.step_optimizer(engine.clip_grad_norm()))
    return taken


def test_b04_a_threshold_is_held_against_the_whole_whatever_the_number_of_ranks():
    for world_size in (1, 2, 4):
        assert run_ranks(_threshold, world_size) == [[True, False]] * world_size


# -- who tells ----------------------------------------------------------------------------------------------


def _warnings(rank, folder):
    seen = []

    class Listener(logging.Handler):
        def emit(self, record):
            seen.append(record.getMessage())

    engine = _adapted(0)
    engine.save_dcp(f"{folder}/x")
    logging.getLogger("orlop").addHandler(listener := Listener(logging.WARNING))
    report = _adapted(1).load_dcp(f"{folder}/x")
    logging.getLogger("orlop").removeHandler(listener)
    facts = {fact.name: (fact.recorded, fact.live) for fact in report.facts}
    return seen, facts["mesh"], facts["world size"]


def test_one_warning_on_one_rank(tmp_path):
    ((seen, mesh, world), (silent, *_)) = run_ranks(_warnings, 2, str(tmp_path))
    assert len(seen) == 1
    assert seen[0].startswith("2 parameters have no state")
    assert silent == []
    assert mesh == ("dim0=2", "dim0=2")
    assert world == ("2", "2")
