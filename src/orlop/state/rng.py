"""The random streams of this rank, saved and restored exactly.

Owns: Python's `random`, NumPy's global generator, torch's CPU generator, the accelerator's generators, and
generators that a user names. States are plain data (ints, floats, strings, lists, bytes), never pickled
objects. Must not know of ranks or files: each rank has streams of its own, and saves its own state.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from types import NoneType
from typing import Any

import numpy as np
import torch

from orlop.arguments import require_kind
from orlop.errors import CheckpointMismatch

_log = logging.getLogger("orlop")


class RngState:
    """A part that holds every random stream of this rank.

    Saving draws nothing. Loading is exact: the next draws equal, bit for bit, those that followed the save.
    Everything is tried out on throw-away generators before the first live one changes.

    Args:
        generators: Further generators to save with them, by name (a sampler's own, say).

    Attributes:
        per_rank: Saved for each rank, even where all hold the same: another number of ranks can't go on from it.
    """

    per_rank = True

    def __init__(self, generators: Mapping[str, torch.Generator] | None = None) -> None:
        require_kind("generators", generators, (Mapping, NoneType), "a mapping: torch.Generators by name")
        self._generators = dict(generators or {})
        for name, each in self._generators.items():
            require_kind(f"generator {name!r}", each, torch.Generator, "a torch.Generator")

    def state_dict(self) -> dict[str, Any]:
        """Returns the streams' states as plain data."""
        version, internal, gauss_next = random.getstate()
        return {
            "python": {"version": version, "internal": list(internal), "gauss_next": gauss_next},
            "numpy": _plain(np.random.get_state(legacy=False)),
            "torch": _to_bytes(torch.get_rng_state()),
            "accelerator": _accelerator_states(),
            "generators": {name: _to_bytes(each.get_state()) for name, each in self._generators.items()},
        }

    def check_state_dict(self, state: Mapping[str, Any]) -> str:
        """Why `state` can't be restored here; empty where it can. Changes nothing."""
        try:
            self._rehearse(state)
        except CheckpointMismatch as error:
            return f"expected {error.expected}, found {error.found}"
        return ""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues the streams where `state` left them.

        Where this rank's accelerators differ from those at the save, the streams that have no counterpart are
        left as they are, with a warning in the log.

        Raises:
            CheckpointMismatch: `state` isn't what `state_dict` returns, or names other generators or another
                kind of NumPy generator than the live ones; nothing has changed.
        """
        python, numpy_state, cpu, named = self._rehearse(state)
        random.setstate(python)
        np.random.set_state(numpy_state)
        torch.set_rng_state(cpu)
        for name, each in named.items():
            self._generators[name].set_state(each)
        _restore_accelerator(state["accelerator"])

    def _rehearse(
        self, state: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], torch.Tensor, dict[str, torch.Tensor]]:
        """The states of Python, NumPy, torch and the generators, each tried out on a throw-away one."""
        try:
            python = _python_state(state["python"])
            random.Random().setstate(python)
            numpy_state = dict(state["numpy"])
            _rehearse_numpy(numpy_state)
            cpu = _from_bytes(state["torch"])
            torch.Generator().set_state(cpu)
            named = {name: _from_bytes(each) for name, each in state["generators"].items()}
            for name, each in named.items():
                torch.Generator(self._generators[name].device).set_state(each)
            state["accelerator"]
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise _mismatch(
                "can't be restored",
                f"the states of Python, NumPy, torch and these generators: {_names(self._generators)}",
                f"{type(error).__name__}: {error}",
            ) from error
        if set(named) != set(self._generators):
            raise _mismatch("lacks a generator", _names(self._generators), _names(named))
        return python, numpy_state, cpu, named


def _mismatch(fault: str, expected: str, found: str) -> CheckpointMismatch:
    return CheckpointMismatch(
        f"The saved random state {fault}; nothing was changed",
        where="rng",
        expected=expected,
        found=found,
        todo="to start the random streams afresh: LoadPolicy(skip_parts={'rng'})",
    )


def _names(generators: Mapping[str, object]) -> str:
    return ", ".join(sorted(generators)) or "none"


def _python_state(saved: Mapping[str, Any]) -> tuple[Any, ...]:
    return saved["version"], tuple(saved["internal"]), saved["gauss_next"]


def _plain(value: Any) -> Any:
    """NumPy's state with its arrays and scalars as lists and numbers."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def _rehearse_numpy(saved: dict[str, Any]) -> None:
    live = np.random.get_state(legacy=False)["bit_generator"]
    if saved["bit_generator"] != live:
        raise ValueError(f"NumPy's global generator is {live}, not {saved['bit_generator']}")
    np.random.RandomState(getattr(np.random, live)()).set_state(saved)


def _to_bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _from_bytes(saved: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(saved), dtype=torch.uint8)


def _accelerator_states() -> dict[str, Any] | None:
    """The states of all this process's devices, and which one is current; None without an accelerator."""
    if not torch.accelerator.is_available():
        return None
    device = torch.accelerator.current_accelerator()
    assert device is not None
    module = torch.get_device_module(device)
    count = torch.accelerator.device_count()
    states = [_to_bytes(module.get_rng_state(torch.device(device.type, i))) for i in range(count)]
    return {"type": device.type, "current": torch.accelerator.current_device_index(), "states": states}


def _restore_accelerator(saved: Mapping[str, Any] | None) -> None:
    live = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if saved is None and live is None:
        return
    if saved is None or live is None or saved["type"] != live.type:
        _log.warning(
            "rng: the accelerator's random stream was not restored: saved on %s, running on %s",
            "none" if saved is None else saved["type"],
            "none" if live is None else live.type,
        )
        return
    module = torch.get_device_module(live)
    current, count = torch.accelerator.current_device_index(), torch.accelerator.device_count()
    for index, state in list(enumerate(saved["states"]))[:count]:
        module.set_rng_state(_from_bytes(state), torch.device(live.type, index))
    # The stream that counts is the one that this rank draws from, whatever number its device has today.
    module.set_rng_state(_from_bytes(saved["states"][saved["current"]]), torch.device(live.type, current))
