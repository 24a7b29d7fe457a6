"""Save and resume on real ranks: bit-equal continuation, other world sizes, plain DCP both ways, failing together."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from orlop import compat, swap
from orlop.dcp import Writer
from orlop.engine import TrainEngine
from orlop.resume import LoadPolicy
from orlop.state.fingerprint import fingerprint
from orlop.testing import run_ranks

pytestmark = pytest.mark.dist

# Where FSDP2 can't run on the CPU, the same tests with DTensors of the user's own.
SHARDED = "fully_shard" if compat.torch_release() >= (2, 9) else "distribute_tensor"


class Toy(nn.Module):
    """Uneven and one-element parameters, a tied, a frozen and an unused one, and a buffer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.register_buffer("calls", torch.zeros(2))
        self.scale = nn.Parameter(torch.ones(1))
        self.second = nn.Linear(7, 3)
        self.tied = nn.Linear(5, 7, bias=False)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(3, 3)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(3, 5)

    def forward(self, x):
        self.calls += 0.5
        hidden = torch.relu(self.first(x) + self.tied(x)) * self.scale
        return self.frozen(self.second(hidden))


def _shard(model, how):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if how == "fully_shard":
        fully_shard(model, mesh=mesh)
        return
    for module in model.modules():
        for name, param in list(module._parameters.items()):
            if param is not None and (name, module) != ("weight", model.tied):
                sharded = nn.Parameter(distribute_tensor(param, mesh, [Shard(0)]), param.requires_grad)
                module._parameters[name] = sharded
    model.tied.weight = model.first.weight


def _engine(how=SHARDED, lr=1e-2, seed=0, kind="stock"):
    torch.manual_seed(seed)
    model = Toy()
    if how != "plain":
        _shard(model, how)
    params = [param for name, param in model.named_parameters() if param.requires_grad]
    groups = [{"params": params[:2], "lr": lr}, {"params": params[2:], "lr": lr * 3, "weight_decay": 0.0}]
    optimizer = swap(torch.optim.AdamW)(groups) if kind == "swapped" else torch.optim.AdamW(groups)
    return TrainEngine(
        model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), max_grad_norm=0.5
    )


def _loss(model, batch):
    out = model(batch)
    return (
        out.square().sum() / out.numel()
    )  # a mean of DTensors needs ReduceOp.AVG, which gloo lacks up to 2.8


def _as_input(model, x):
    if isinstance(model.scale, DTensor) and not isinstance(model, FSDPModule):
        return distribute_tensor(x, model.scale.device_mesh, [Replicate()])
    return x


def _train(engine, step):
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(step))
    x = _as_input(engine.model, x)
    loss = engine.train_step([x[:3], x[3:]], _loss)
    for param in engine.model.parameters():
        if isinstance(param.grad, DTensor) and param.grad.placements != param.placements:
            param.grad = param.grad.redistribute(placements=param.placements)
    norm = engine.clip_grad_norm()
    assert engine.step_optimizer(norm)
    engine.scheduler.step()
    return loss, norm.item()


def _local(tensor):
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _state(engine):
    values = {name: _local(value).clone() for name, value in engine.model.state_dict().items()}
    names = {param: name for name, param in engine.model.named_parameters()}
    (optimizer,) = engine.optimizers.values()
    for param, state in optimizer.state.items():
        for key, value in state.items():
            values[f"{names[param]}.{key}"] = _local(value).clone()
    for index, group in enumerate(optimizer.param_groups):
        values[f"lr.{index}"] = torch.tensor(group["lr"])
    return values


def _equal(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.dtype == other[name].dtype, name
        assert torch.equal(value, other[name]), name


def _pointers(optimizer):
    """Where each moment lies; before a load only host-resident optimizers have any."""
    return {
        (param, key): _local(value).data_ptr()
        for param, state in optimizer.state.items()
        for key, value in state.items()
    }


def _two_engines(rank, folder, kind):
    first = _engine(kind=kind)
    for step in range(3):
        _train(first, step)
    first.save_dcp(f"{folder}/a")
    expected = _train(first, 3)
    second = _engine(lr=0.7, seed=1, kind=kind)
    optimizer = second.optimizers["optimizer"]
    pointers = {n: _local(v).data_ptr() for n, v in second.model.state_dict().items()}
    lists = optimizer.param_groups, *optimizer.param_groups
    moments = _pointers(optimizer)
    assert bool(moments) == (kind == "swapped")
    report = second.load_dcp(f"{folder}/a")
    assert moments in ({}, _pointers(optimizer))
    assert {n: _local(v).data_ptr() for n, v in second.model.state_dict().items()} == pointers
    assert all(a is b for a, b in zip(lists, (optimizer.param_groups, *optimizer.param_groups)))
    loaded = _pointers(optimizer)
    assert _train(second, 3) == expected
    _equal(_state(first), _state(second))
    assert _pointers(optimizer) == loaded
    for param, state in optimizer.state.items():
        for key in ("exp_avg", "exp_avg_sq"):
            assert isinstance(state[key], DTensor)
            assert (state[key].shape, state[key].placements) == (param.shape, param.placements)
        assert state["step"].device.type == "cpu"
    assert second.model.tied.weight is second.model.first.weight
    return report.counts, sorted(finding.leaf for finding in report.of("absent"))


@pytest.mark.parametrize("kind", ["stock", "swapped"])
def test_two_engines_go_on_bit_equal(tmp_path, kind):
    for counts, absent in run_ranks(_two_engines, 2, str(tmp_path), kind):
        assert absent == ["optimizer.state.unused.bias", "optimizer.state.unused.weight"]
        assert set(counts) == {"loaded", "absent"}
    assert sorted(os.listdir(tmp_path)) == ["a"]


def _save_at(rank, folder, how):
    engine = _engine(how, kind="swapped")
    for step in range(2):
        _train(engine, step)
    engine.save_dcp(f"{folder}/{how}")
    return fingerprint(engine).leaves


def _hop(rank, source, target, how):
    engine = _engine(how, lr=0.5, seed=4)
    engine.load_dcp(source)
    leaves = fingerprint(engine).leaves
    engine.save_dcp(target)
    return leaves


@pytest.mark.parametrize("how", [pytest.param("fully_shard", marks=pytest.mark.fsdp), "distribute_tensor"])
def test_state_is_the_same_on_other_world_sizes(tmp_path, how):
    (start, other) = run_ranks(_save_at, 2, str(tmp_path), how)
    assert start == other
    assert len(start) > 20
    source = f"{tmp_path}/{how}"
    for world_size, kind in ((3, how), (1, "plain"), (4, how)):
        target = f"{tmp_path}/{how}-{world_size}"
        for leaves in run_ranks(_hop, world_size, source, target, kind):
            assert leaves == start
        source = target


def _interop(rank, folder):
    ours = _engine()
    for step in range(2):
        _train(ours, step)
    # What orlop saved, plain DCP reads. A template that expects absent state fails there, so give the branch a step.
    for param in ours.model.unused.parameters():
        param.grad = torch.ones_like(param)
    assert ours.step_optimizer(1.0)
    ours.save_dcp(f"{folder}/ours")
    plain = _engine(lr=0.3, seed=5)
    (theirs,) = plain.optimizers.values()
    template = {
        "model": get_model_state_dict(plain.model),
        "optimizer": get_optimizer_state_dict(plain.model, theirs),
    }
    dcp.load(template, checkpoint_id=f"{folder}/ours")
    set_model_state_dict(plain.model, template["model"])
    set_optimizer_state_dict(plain.model, theirs, template["optimizer"])
    _equal(_state(ours), _state(plain))
    # And the other way round, in both of torch's layouts.
    for flat in (False, True):
        options = dcp.state_dict.StateDictOptions(flatten_optimizer_state_dict=flat)
        saved = {
            "model": get_model_state_dict(plain.model),
            "optimizer": get_optimizer_state_dict(plain.model, theirs, options=options),
        }
        dcp.save(saved, checkpoint_id=f"{folder}/plain-{flat}")
        back = _engine(lr=0.9, seed=6)
        back.scheduler = None
        back.load_dcp(f"{folder}/plain-{flat}")
        _equal(_state(plain), _state(back))
    return True


def test_plain_dcp_reads_what_orlop_saved_and_the_reverse(tmp_path):
    assert run_ranks(_interop, 2, str(tmp_path)) == [True, True]


def _norms(rank, world):
    results = {}
    for how in dict.fromkeys((SHARDED, "distribute_tensor")) if world > 1 else ("plain",):
        engine = _engine(how)
        engine.max_grad_norm = 1e-3
        x = torch.randn(6, 5, generator=torch.Generator().manual_seed(3))
        engine.train_step([_as_input(engine.model, x)], _loss)
        norm = engine.clip_grad_norm()
        clipped = engine.clip_grad_norm()
        results[how] = norm.item(), clipped.item()
    return results


def test_norm_equals_the_single_process_norm_on_every_rank():
    ((norm, clipped),) = run_ranks(_norms, 1, 1)[0].values()
    ranks = run_ranks(_norms, 3, 3)
    assert ranks[0] == ranks[1] == ranks[2]
    for sharded, sharded_clipped in ranks[0].values():
        assert sharded == pytest.approx(norm, rel=1e-6)
        assert sharded_clipped == pytest.approx(clipped, rel=1e-5)
    assert clipped == pytest.approx(1e-3, rel=1e-3)


class FullDisk(Writer):
    def write_data(self, plan, planner):
        if dist.get_rank() == 1:
            raise OSError(28, "No space left on device")
        return super().write_data(plan, planner)


def _caught(act):
    try:
        act()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def _fail_save(rank, folder):
    import orlop.save

    engine = _engine()
    _train(engine, 0)
    before = _state(engine)
    orlop.save.Writer = FullDisk
    error = _caught(lambda: engine.save_dcp(f"{folder}/x"))
    _equal(before, _state(engine))
    return error, os.listdir(folder)


def test_a_full_disk_on_one_rank_fails_all_and_publishes_nothing(tmp_path):
    (first, left), (second, _) = run_ranks(_fail_save, 2, str(tmp_path), timeout_seconds=60)
    assert first == second
    assert first[0] == "StorageFull"
    assert "rank 1" in first[1]
    assert "make room there" in first[1]
    assert "No space left on device" in first[1]
    assert left == []


def _save_apart(rank, folder):
    engine = _engine()
    before = _state(engine)
    error = _caught(lambda: engine.save_dcp(f"{folder}/x{rank}"))
    _equal(before, _state(engine))
    return error, os.listdir(folder)


def test_a_path_that_differs_by_rank_is_one_error_that_names_both(tmp_path):
    (first, left), (second, _) = run_ranks(_save_apart, 2, str(tmp_path), timeout_seconds=60)
    assert first == second
    assert first[0] == "CheckpointMismatch"
    assert f"{tmp_path}/x0" in first[1]
    assert f"{tmp_path}/x1" in first[1]
    assert "rank 1" in first[1]
    assert left == []


class Torn(FileSystemReader):
    def read_data(self, plan, planner):
        if dist.get_rank() == 1 and any("exp_avg" in item.dest_index.fqn for item in plan.items):
            raise OSError(5, "Input/output error")
        return super().read_data(plan, planner)


def _fail_load(rank, folder, kind):
    engine = _engine(kind=kind)
    _train(engine, 0)
    engine.save_dcp(f"{folder}/x")
    saved = _state(engine)
    other = _engine(seed=3, kind=kind)
    errors = [
        _caught(lambda: other.load_dcp(f"{folder}/x", storage_reader=Torn(f"{folder}/x"))),
        _caught(lambda: other.step_optimizer(1.0)),
        _caught(lambda: other.save_dcp(f"{folder}/y")),
    ]
    if kind == "swapped":
        assert _caught(other.optimizers["optimizer"].step)[0] == "StateNotReady"
    other.load_dcp(f"{folder}/x")
    _equal(saved, _state(other))
    _train(other, 1)
    return errors


@pytest.mark.parametrize("kind", ["stock", "swapped"])
def test_a_torn_load_refuses_step_and_save_until_one_succeeds(tmp_path, kind):
    first, second = run_ranks(_fail_load, 2, str(tmp_path), kind, timeout_seconds=60)
    assert first == second
    assert [error[0] for error in first] == ["RankFailed", "StateNotReady", "StateNotReady"]
    assert "Input/output error" in first[0][1]
    assert "half-way" in first[1][1]
    assert sorted(os.listdir(tmp_path)) == ["x"]


class Counter:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def _save_parts(rank, folder):
    engine = _engine()
    engine.parts.update(data=Counter(rank + 10), shared=Counter(5))
    engine.save_dcp(f"{folder}/x")
    back = _engine()
    back.parts.update(data=Counter(0), shared=Counter(0))
    back.load_dcp(f"{folder}/x")
    return back.parts["data"].value, back.parts["shared"].value


def _load_parts(rank, folder):
    engine = _engine(seed=2)
    engine.parts.update(data=Counter(0), shared=Counter(0))
    before = _state(engine)
    error = _caught(lambda: engine.load_dcp(f"{folder}/x"))
    _equal(before, _state(engine))
    engine.load_dcp(f"{folder}/x", policy=LoadPolicy(skip_parts=frozenset({"data"})))
    return error, engine.parts["data"].value, engine.parts["shared"].value


def test_parts_that_differ_by_rank_keep_their_rank(tmp_path):
    assert run_ranks(_save_parts, 2, str(tmp_path)) == [(10, 5), (11, 5)]
    keys = FileSystemReader(Path(tmp_path) / "x").read_metadata().state_dict_metadata
    assert {"data.rank_0", "data.rank_1", "shared"} <= keys.keys()
    for error, data, shared in run_ranks(_load_parts, 3, str(tmp_path)):
        assert error[0] == "CheckpointMismatch"
        assert "saved for each of 2 ranks" in error[1]
        assert (data, shared) == (0, 5)


def _differ_on_one_rank(rank, folder):
    engine = _engine()
    _train(engine, 0)
    engine.save_dcp(f"{folder}/x")
    other = _engine(seed=3)
    if rank == 1:
        other.model.register_buffer("calls", torch.zeros(3))
    before = _state(other)
    error = _caught(lambda: other.load_dcp(f"{folder}/x"))
    _equal(before, _state(other))
    return error


def test_what_does_not_fit_one_rank_is_refused_on_all(tmp_path):
    first, second = run_ranks(_differ_on_one_rank, 2, str(tmp_path), timeout_seconds=60)
    assert first == second
    assert first[0] == "CheckpointMismatch"
    assert "shape: model.calls (expected (3,), found (2,); on rank 1)" in first[1]


def _save_after_eval(rank, folder):
    engine = _engine()
    _train(engine, 0)
    with torch.no_grad():
        engine.model(
            torch.ones(2, 5)
        )  # FSDP2 leaves the root unsharded: its parameters are other objects now
    engine.save_dcp(f"{folder}/x")
    other = _engine(seed=3)
    other.load_dcp(f"{folder}/x")
    _equal(_state(engine), _state(other))
    return True


@pytest.mark.fsdp
def test_saving_between_forward_and_backward_of_fsdp(tmp_path):
    assert run_ranks(_save_after_eval, 2, str(tmp_path)) == [True, True]
