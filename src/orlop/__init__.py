"""orlop: optimizer state in host memory, and training that resumes exactly.

The public names, nothing else. They are found on first use, so `import orlop` imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from orlop.version import __version__

if TYPE_CHECKING:
    from orlop import errors as errors
    from orlop import testing as testing
    from orlop.checkpoints import CheckpointStore as CheckpointStore
    from orlop.checkpoints import Resumed as Resumed
    from orlop.configs import AdamWConfig as AdamWConfig
    from orlop.configs import LoadCheckpointConfig as LoadCheckpointConfig
    from orlop.engine import TrainEngine as TrainEngine
    from orlop.optim.figures import trace as trace
    from orlop.optim.swap import SwapAdamW as SwapAdamW
    from orlop.optim.swap import swap as swap
    from orlop.phases import phase as phase
    from orlop.resume import LoadPolicy as LoadPolicy
    from orlop.resume import LoadReport as LoadReport
    from orlop.state.data import DataStream as DataStream
    from orlop.state.fingerprint import Fingerprint as Fingerprint
    from orlop.state.rng import RngState as RngState
    from orlop.tools.check import verify as verify
    from orlop.tools.diff import diff as diff
    from orlop.tools.findings import Finding as Finding
    from orlop.tools.fingerprints import fingerprint as fingerprint
    from orlop.tools.record import record as record
    from orlop.trainer import Trainer as Trainer

_HOMES = {
    "AdamWConfig": "orlop.configs",
    "CheckpointStore": "orlop.checkpoints",
    "DataStream": "orlop.state.data",
    "Finding": "orlop.tools.findings",
    "Fingerprint": "orlop.state.fingerprint",
    "LoadCheckpointConfig": "orlop.configs",
    "LoadPolicy": "orlop.resume",
    "LoadReport": "orlop.resume",
    "Resumed": "orlop.checkpoints",
    "RngState": "orlop.state.rng",
    "SwapAdamW": "orlop.optim.swap",
    "TrainEngine": "orlop.engine",
    "Trainer": "orlop.trainer",
    "diff": "orlop.tools.diff",
    "fingerprint": "orlop.tools.fingerprints",
    "phase": "orlop.phases",
    "record": "orlop.tools.record",
    "swap": "orlop.optim.swap",
    "trace": "orlop.optim.figures",
    "verify": "orlop.tools.check",
}
_MODULES = ("errors", "testing")

__all__ = ["__version__", *_MODULES, *_HOMES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"orlop.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'orlop' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
