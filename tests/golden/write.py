"""Write the golden checkpoint of the torch that runs this: two ranks, plain torch and DCP, nothing of orlop.

    python tests/golden/write.py      writes torch-<version>.tar.xz and torch-<version>.json beside this file

The archive holds the same training state twice, `nested/` and `flattened/`, in torch's two optimizer layouts. The JSON
file holds what it must be read as: every tensor's raw little-endian bytes in hex, taken from the live tensors and not
from the files. Run it once for each version, in an environment of that version, and never change what it wrote: these
files stand for what users have on their disks.
"""

from __future__ import annotations

import ctypes
import json
import sys
import tarfile
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

WORLD, STEPS = 2, 3


class Net(nn.Module):
    """An uneven matrix, a single element (rank 1 has none of it), and a parameter that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.linspace(-1.0, 1.0, 15).reshape(5, 3))
        self.single = nn.Parameter(torch.tensor([0.3]))
        self.unused = nn.Parameter(torch.linspace(2.0, 3.0, 4).reshape(2, 2))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    groups = [
        {"params": [model.matrix, model.unused], "lr": 0.01, "weight_decay": 0.1},
        {"params": [model.single], "lr": 0.03, "weight_decay": 0.0, "betas": (0.8, 0.99)},
    ]
    return torch.optim.AdamW(groups, amsgrad=True)


def raw(tensor: torch.Tensor) -> dict[str, object]:
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    whole = whole.detach().contiguous().clone()
    content = ctypes.string_at(whole.data_ptr(), whole.numel() * whole.element_size())
    return {
        "dtype": str(whole.dtype).removeprefix("torch."),
        "shape": list(whole.shape),
        "hex": content.hex(),
    }


def expected(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    names = {param: name for name, param in model.named_parameters()}
    return {
        "torch": torch.__version__,
        "model": {name: raw(param) for name, param in model.named_parameters()},
        "state": {
            names[param]: {key: raw(value) for key, value in state.items()}
            for param, state in optimizer.state.items()
        },
        "groups": [
            {**group, "params": [names[param] for param in group["params"]]}
            for group in optimizer.param_groups
        ],
    }


def train_and_save(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,))
    model = Net()
    for name, param in list(model.named_parameters()):
        setattr(model, name, nn.Parameter(distribute_tensor(param.detach(), mesh, [Shard(0)])))
    optimizer = make_optimizer(model)
    for step in range(STEPS):
        for name in ("matrix", "single"):
            param = getattr(model, name)
            whole = torch.arange(param.numel(), dtype=torch.float32).reshape(param.shape)
            param.grad = distribute_tensor((whole + step).sin() / 3, mesh, [Shard(0)])
        optimizer.step()
        optimizer.zero_grad()
    truth = expected(model, optimizer)
    if rank == 0:
        Path(folder, "expected.json").write_text(json.dumps(truth, indent=1) + "\n")
    for layout in ("nested", "flattened"):
        options = StateDictOptions(flatten_optimizer_state_dict=layout == "flattened")
        saved = {
            "model": get_model_state_dict(model),
            "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
        }
        dcp.save(saved, checkpoint_id=f"{folder}/{layout}")
    dist.barrier()
    dist.destroy_process_group()


def main(target: Path) -> None:
    version = torch.__version__.partition("+")[0]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train_and_save, args=(folder,), nprocs=WORLD)
        with tarfile.open(target / f"torch-{version}.tar.xz", "w:xz") as archive:
            for layout in ("nested", "flattened"):
                for file in sorted(Path(folder, layout).iterdir()):
                    archive.add(file, f"{layout}/{file.name}", filter=_anonymous)
        (target / f"torch-{version}.json").write_text(Path(folder, "expected.json").read_text())


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
