"""What tests of training code need, orlop's own and its users': real ranks in real processes.

`run_ranks` starts one process per rank with a gloo group over all of them, and leaves none behind. `FaultyFiles` and
`CrashLog` make the disk under a store fail or lose power. Must not know what the ranks do.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from orlop.errors import RankFailed
from orlop.optim.conformance import check_link
from orlop.optim.threads import ThreadLink
from orlop.store.crashes import Crash, CrashLog
from orlop.store.faults import FaultyFiles
from orlop.store.operations import observed
from orlop.wording import counted

__all__ = ["Crash", "CrashLog", "FaultyFiles", "ThreadLink", "check_link", "observed", "run_ranks"]

# How long ranks may still speak after the first of them failed, and what a stopping process gets before the kill.
_GRACE_SECONDS = 5.0
_END_SECONDS = 30.0  # for a process that has returned: torch takes some to end where the machine is busy


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    module: str
    function: str
    paths: list[str]
    arguments: bytes
    world_size: int
    folder: str
    timeout_seconds: float


@dataclass(slots=True, kw_only=True)
class _Rank:
    process: BaseProcess
    pipe: Connection
    result: Any = None
    failure: str | None = None
    done: bool = False


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_seconds: float = 120.0
) -> list[Any]:
    """Run `fn(rank, *args)` in `world_size` processes that share a gloo process group.

    Args:
        fn: A function at the top of its module; it and its results are pickled.
        world_size: How many ranks, from 1.
        *args: The further arguments, pickled.
        timeout_seconds: After this time all ranks are killed and their stacks shown.

    Returns:
        The results, in rank order.

    Raises:
        RankFailed: A rank raised, died, or did not end in time; the message holds every such rank's traceback.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["orlop.testing", "torch.distributed.checkpoint", "torch.distributed.fsdp"]
    )
    with tempfile.TemporaryDirectory(prefix="orlop-ranks-") as folder:
        task = _describe(fn, args, world_size, folder, timeout_seconds)
        ranks: list[_Rank] = []
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_main, args=(rank, task, theirs), name=f"rank {rank}")
                process.start()
                theirs.close()
                ranks.append(_Rank(process=process, pipe=ours))
            _collect(ranks, time.monotonic() + timeout_seconds, Path(folder))
        finally:
            _end(ranks)
    failed = {rank: entry.failure for rank, entry in enumerate(ranks) if entry.failure is not None}
    if failed:
        text = "\n".join(f"--- rank {rank} ---\n{failure.rstrip()}" for rank, failure in failed.items())
        raise RankFailed(
            f"{len(failed)} of {counted(world_size, 'rank')} failed in {task.function}", found="\n" + text
        )
    return [entry.result for entry in ranks]


def _describe(
    fn: Callable[..., Any], args: tuple[Any, ...], world_size: int, folder: str, timeout_seconds: float
) -> _Task:
    module = sys.modules[fn.__module__]
    paths = [path for path in sys.path if path]
    file = Path(getattr(module, "__file__", None) or ".").resolve()
    depth = fn.__module__.count(".")
    if depth < len(file.parents):
        # A test module imported by path need not be importable by name in another process: give it its root.
        paths.append(str(file.parents[depth]))
    return _Task(
        module=fn.__module__,
        function=fn.__qualname__,
        paths=paths,
        arguments=pickle.dumps(args),
        world_size=world_size,
        folder=folder,
        timeout_seconds=timeout_seconds,
    )


def _collect(ranks: list[_Rank], deadline: float, folder: Path) -> None:
    while pending := {entry.pipe: entry for entry in ranks if not entry.done}:
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            for rank, entry in enumerate(ranks):
                if not entry.done:
                    entry.failure = f"did not end in time\n{_stack(folder, rank)}"
            return
        for pipe in ready:
            assert isinstance(pipe, Connection)
            entry = pending[pipe]
            entry.done = True
            try:
                entry.result, entry.failure = pickle.loads(pipe.recv_bytes())
            except EOFError:
                entry.process.join(_GRACE_SECONDS)
                entry.failure = f"died with exit code {entry.process.exitcode} and said nothing"
        if any(entry.failure is not None for entry in ranks):
            deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)


def _end(ranks: list[_Rank]) -> None:
    failed = any(entry.failure is not None or not entry.done for entry in ranks)
    for rank, entry in enumerate(ranks):
        entry.process.join(0 if failed and not entry.done else _END_SECONDS)
        if entry.process.is_alive():
            entry.process.kill()
            entry.process.join()
            if entry.done and entry.failure is None:
                entry.failure = "returned, but its process did not end"
        elif entry.done and entry.failure is None and entry.process.exitcode != 0:
            entry.failure = f"returned rank {rank}'s result, then ended with code {entry.process.exitcode}"
        entry.pipe.close()
        entry.process.close()


def _stack(folder: Path, rank: int) -> str:
    path = folder / f"stack.{rank}"
    return path.read_text() if path.exists() else ""


def _main(rank: int, task: _Task, pipe: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    with open(f"{task.folder}/stack.{rank}", "w") as stack:
        faulthandler.dump_traceback_later(task.timeout_seconds * 0.9, file=stack)
        result, failure = None, None
        try:
            result = _run(rank, task)
            answer = pickle.dumps((result, failure))
        except BaseException:
            answer = pickle.dumps((None, traceback.format_exc()))
        faulthandler.cancel_dump_traceback_later()
        pipe.send_bytes(answer)
        pipe.close()
        _leave()


def _run(rank: int, task: _Task) -> Any:
    sys.path.extend(path for path in task.paths if path not in sys.path)
    fn: Any = importlib.import_module(task.module)
    for name in task.function.split("."):
        fn = getattr(fn, name)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(task.world_size),
        LOCAL_WORLD_SIZE=str(task.world_size),
    )
    dist.init_process_group(
        "gloo", init_method=f"file://{task.folder}/store", rank=rank, world_size=task.world_size
    )
    return fn(rank, *pickle.loads(task.arguments))


def _leave() -> None:
    # A mesh that outlives its group may abort the process at interpreter exit: drop the models and meshes first.
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
