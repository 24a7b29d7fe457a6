"""Checkpoints for the tools' tests: orlop's own, plain DCP of several torch versions, and how to damage them."""

import tarfile
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import orlop
from orlop.dcp import Writer

GOLDEN = Path(__file__).parents[2] / "golden"
VERSIONS = ("2.6.0", "2.13.0")


def golden(version: str, folder: Path, layout: str = "nested") -> Path:
    """What plain torch of that version wrote on two ranks."""
    with tarfile.open(GOLDEN / f"torch-{version}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / layout


class Net(nn.Module):
    """Two layers, a tied weight and a parameter that never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 8)
        self.tied = nn.Linear(8, 16)
        self.tied.weight = self.first.weight
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) + self.tied(x).sum()


def engine(seed: int = 0, lr: float = 1e-2) -> orlop.TrainEngine:
    torch.manual_seed(seed)
    model = Net()
    return orlop.TrainEngine(
        model, orlop.SwapAdamW(model.parameters(), lr=lr), parts={"rng": orlop.RngState()}
    )


def train(trained: orlop.TrainEngine, steps: int = 1) -> float:
    loss = 0.0
    for step in range(steps):
        batch = torch.linspace(-1, 1, 8) * (step + 1)
        loss = trained.train_step([batch], lambda model, x: model(x).square().mean())
        trained.step_optimizer(trained.clip_grad_norm())
    return loss


def save_run(root: Path | str, steps: tuple[int, ...] = (10, 20), fingerprint: bool = False) -> Path:
    """A run of orlop's with a checkpoint at each of these steps."""
    trained = engine()
    store = orlop.CheckpointStore(root, keep_last=None)
    for step in steps:
        train(trained)
        store.save(trained, step, fingerprint=fingerprint)
    return root


def save_large(folder: Path, by_orlop: bool) -> Path:
    """Two tensors of a MiB and a byte leaf, by plain torch or by orlop's writer."""
    state = {
        "model": {"a": torch.arange(2**18, dtype=torch.float32), "b": torch.randn(512, 512)},
        "note": {"list": [1, 2.5, "x"], "none": None},
    }
    writer = Writer(folder, num_threads=1) if by_orlop else None
    dcp.save(state, checkpoint_id=folder, storage_writer=writer)
    return folder


def flip(path: Path, at: float) -> None:
    """Flip one bit of a file, at that part of its length."""
    content = bytearray(path.read_bytes())
    content[int(len(content) * at)] ^= 0x10
    path.write_bytes(content)


def data_file(checkpoint: Path) -> Path:
    """The largest data file."""
    return max(checkpoint.glob("*.distcp"), key=lambda path: path.stat().st_size)
