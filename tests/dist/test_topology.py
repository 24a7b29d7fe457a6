"""State that is saved on one mesh and loaded on another: every element in its place, and the same fingerprint.

Every parameter starts as its own global indices before torch's wrappers shard it. So the local tensors tell which
elements a rank holds, whatever the placement, without any arithmetic of orlop's or DTensor's to believe in.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import orlop
from orlop import compat
from orlop.state.fingerprint import fingerprint
from orlop.testing import run_ranks

pytestmark = pytest.mark.dist

ROWS = (1, 2, 3, 4, 5, 7, 9, 13)
SLOTS = ("exp_avg", "exp_avg_sq")


class Net(nn.Module):
    """Two layers for tensor parallelism, four experts, rows of awkward numbers, and a part that never trains."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(5, 10)
        self.down = nn.Linear(10, 5)
        self.experts = nn.Module()
        self.experts.weight = nn.Parameter(torch.empty(4, 3, 5))
        self.rows = nn.ParameterDict({f"r{rows}": nn.Parameter(torch.empty(rows, 2)) for rows in ROWS})
        self.late = nn.Linear(3, 3)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.arange(param.numel(), dtype=torch.float32).view(param.shape))


# -- the meshes ------------------------------------------------------------------------------------------------------


def _distribute(module, mesh, *placements):
    for child in module.modules():
        for name, param in list(child._parameters.items()):
            if param is not None:
                child._parameters[name] = nn.Parameter(distribute_tensor(param.detach(), mesh, placements))


def _plain(model):
    pass


def _rows(model):
    _distribute(model, init_device_mesh("cpu", (dist.get_world_size(),)), Shard(0))


def _rows_twice(model):
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("outer", "inner"))
    _distribute(model, mesh, Shard(0), Shard(0))


def _columns(model):
    """Experts over one mesh dimension and their columns over the other; one layer with replicas."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("expert", "inner"))
    _distribute(model.experts, mesh, Shard(0), Shard(2))
    _distribute(model.up, mesh, Replicate(), Shard(0))


def _fsdp(model):
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def _hsdp(model):
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def _parallelize(model, mesh):
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def _tp(model):
    _parallelize(model, init_device_mesh("cpu", (dist.get_world_size(),)))


def _dp_tp(model):
    """D12: only the tensor-parallel sub-mesh is in the DTensors; the other dimension replicates, unknown to them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    _parallelize(model, mesh["tp"])


def _fsdp_tp(model):
    """D10: the same dimension is sharded twice, so a rank's rows are strided."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    _parallelize(model, mesh["tp"])
    fully_shard(model, mesh=mesh["dp"])


def _ep(model):
    """D11: whole experts to the ranks of one dimension, each of them sharded over the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "ep"))
    _distribute(model.experts, mesh["ep"], Shard(0))
    fully_shard(model.experts, mesh=mesh["fsdp"])
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))


MESHES = {
    "plain": _plain,
    "rows": _rows,
    "rows_twice": _rows_twice,
    "columns": _columns,
    "fsdp": _fsdp,
    "hsdp": _hsdp,
    "tp": _tp,
    "dp_tp": _dp_tp,
    "fsdp_tp": _fsdp_tp,
    "ep": _ep,
}


# -- a run on one of them --------------------------------------------------------------------------------------------


class Run:
    """A model on a mesh, its engine, and which global elements this rank holds."""

    def __init__(self, mesh, swapped):
        model = Net()
        MESHES[mesh](model)
        self.params = dict(model.named_parameters())
        self.held = {name: _local(param).detach().clone() for name, param in self.params.items()}
        optimizer = (orlop.SwapAdamW if swapped else torch.optim.AdamW)(model.parameters(), lr=0.1)
        self.engine = orlop.TrainEngine(model, optimizer)

    def wanted(self):
        """What every tensor of this rank must hold: a function of the global index alone."""
        for order, (name, held) in enumerate(self.held.items()):
            yield (name, "param"), held * 7 / 8 + order
            if not name.startswith("late"):
                yield (name, "step"), torch.tensor(float(order + 2))
                for slot, key in enumerate(SLOTS, 1):
                    yield (name, key), held / 16 + order + slot * 100

    def tensor(self, name, key):
        param = self.params[name]
        state = self.engine.optimizers["optimizer"].state
        return _local(param if key == "param" else state[param][key])

    @torch.no_grad()
    def train(self):
        """A step, which marks what has stepped, then the values that are checked for."""
        for name, param in self.params.items():
            if not name.startswith("late"):
                param.grad = torch.zeros_like(param)
        assert self.engine.step_optimizer(1.0)
        for where, value in self.wanted():
            self.tensor(*where).copy_(value)

    def require_boxes(self):
        """Where orlop says that each part lies is where its elements are."""
        for name, param in self.params.items():
            offsets, sizes = compat.local_box(param)
            numbers = torch.arange(param.numel(), dtype=torch.float32).view(param.shape)
            for axis, (offset, size) in enumerate(zip(offsets, sizes)):
                numbers = numbers.narrow(axis, offset, size)
            assert torch.equal(numbers, self.held[name]), (name, offsets, sizes)

    def require_whole(self):
        for (name, key), value in self.wanted():
            assert torch.equal(self.tensor(name, key), value), (name, key)


def _local(tensor):
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _hops(rank, folder, source, names, swapped=True):
    """From `source` on, each mesh loads what the one before it saved; with no source the first one trains."""
    leaves = []
    for hop, name in enumerate(names):
        run = Run(name, swapped)
        if source is None:
            run.train()
        else:
            with torch.no_grad():
                for param in run.params.values():
                    _local(param).zero_()
            report = run.engine.load_dcp(source)
            absent = {finding.leaf for finding in report.of("absent")}
            assert absent == {"optimizer.state.late.weight", "optimizer.state.late.bias"}
        run.require_boxes()
        run.require_whole()
        leaves.append(fingerprint(run.engine).leaves)
        source = f"{folder}/{hop}-{name}"
        run.engine.save_dcp(source)
    return source, leaves


def _travel(folder, *stages):
    """Go through all stages (world size, meshes); every rank must find the same fingerprint everywhere."""
    source, first = None, None
    for number, (world_size, names) in enumerate(stages):
        results = run_ranks(_hops, world_size, f"{folder}/{number}", source, names, number % 2 == 0)
        source = results[0][0]
        for _, everywhere in results:
            for name, leaves in zip(names, everywhere):
                first = first or leaves
                assert leaves == first, (world_size, name)
    return first


@pytest.mark.fsdp
def test_state_survives_a_journey_over_world_sizes_and_meshes(tmp_path):
    """D01, D06, D10, D11, D12: 1 → 2 → 3 → 4 ranks, over every kind of mesh, and back to one."""
    leaves = _travel(
        tmp_path,
        (1, ["plain"]),
        (2, ["fsdp", "tp"]),
        (3, ["rows", "fsdp"]),
        (4, ["fsdp_tp", "hsdp", "ep", "dp_tp", "columns", "ep", "fsdp", "fsdp_tp"]),
        (2, ["tp", "fsdp"]),
        (1, ["plain"]),
    )
    assert len(leaves) > 40


def test_state_survives_a_journey_over_dtensor_meshes(tmp_path):
    """D01, D06 with DTensors of the user's own: for torch without FSDP2 on the CPU too."""
    _travel(
        tmp_path,
        (1, ["plain"]),
        (2, ["rows", "tp"]),
        (3, ["rows"]),
        (4, ["columns", "dp_tp", "rows_twice"]),
        (1, ["plain"]),
    )


def test_rows_that_are_sharded_twice_are_in_their_place(tmp_path):
    """D02: 1 to 13 rows over a 2 x 4 mesh: many ranks have none."""
    _travel(tmp_path, (8, ["rows_twice", "rows_twice"]), (1, ["plain"]))


# -- the fingerprint -------------------------------------------------------------------------------------------------


class Traffic(TorchDispatchMode):
    """The bytes of every tensor that goes into a collective."""

    def __init__(self):
        super().__init__()
        self.nbytes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "c10d" in function.namespace:
            tensors = torch.utils._pytree.tree_leaves((args, kwargs))
            self.nbytes += [t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor)]
        return function(*args, **(kwargs or {}))


def _measure(rank):
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Linear(512, 512, bias=False)
    _distribute(model, mesh, Shard(0))
    engine = orlop.TrainEngine(model, orlop.SwapAdamW(model.parameters()))
    model.weight.grad = torch.ones_like(model.weight)
    assert engine.step_optimizer(1.0)
    with Traffic() as traffic:
        fingerprint(engine)
    with Traffic() as gathered:
        model.weight.full_tensor()
    return max(traffic.nbytes), max(gathered.nbytes)


def test_the_fingerprint_gathers_no_tensor():
    for most, whole in run_ranks(_measure, 2):
        assert whole >= 512 * 512 * 4 / 2  # the meter sees what a gather would send
        assert most < 16 * 1024
