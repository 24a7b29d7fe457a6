"""The training loop that resumes by itself: restart the same command, and the run goes on bit for bit.

Owns the order of things in a run: resume, step, report, save, stop. Must not know how any of them is done
(`engine`, `checkpoints`, `state`, `store`), nor what a batch or a model is.
"""

from __future__ import annotations

import logging
import operator
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch

from orlop.arguments import require_callable, require_count, require_engine, require_kind
from orlop.batches import call_model, count_tokens_of
from orlop.checkpoints import CheckpointStore
from orlop.configs import LoadCheckpointConfig
from orlop.display import progress_bar
from orlop.errors import CheckpointMismatch
from orlop.rates import learning_rates, put_rates, put_schedule_back, schedule_of, scheduled_keys
from orlop.resume import LoadPolicy, LoadReport
from orlop.signals import sigterm
from orlop.state.data import DataStream
from orlop.state.policy import require_options
from orlop.state.progress import Progress
from orlop.state.rng import RngState
from orlop.store.metrics import MetricsLog, StepRecord
from orlop.store.objects import Url

if TYPE_CHECKING:
    from orlop.engine import TrainEngine

_log = logging.getLogger("orlop")

LossFn = Callable[[Any, Any], torch.Tensor]


class Trainer:
    """Trains to `total_steps`, saving as it goes; a restarted run goes on where its last checkpoint stands.

    All ranks build it alike, which is collective, and call `run`. It adds the parts `rng`, `data` and `progress` to the
    engine's.

    Args:
        engine: Model, optimizers and scheduler.
        store: The run's own checkpoints; where it holds one, the run resumes from that. A path stands for
            `CheckpointStore(path)`.
        data: This rank's batches, iterable once per epoch (see `DataStream`).
        total_steps: Where the run ends.
        save_every: Steps between checkpoints; the last step is always saved.
        resume: Where a run without a checkpoint of its own starts from: a config, or the checkpoint's path alone.
        policy: What loading may tolerate; by default, nothing.
        load_args: False keeps this script's hyperparameters (lr, betas, ...) when the run resumes; a scheduler goes on
            at its place, from this script's rates. By default the checkpoint's win, and what differs is logged.
        loss_fn: `(model, batch) -> 0-dim loss`. By default the model is called with the batch (mappings as
            keywords, lists and tuples as arguments) and returns the loss, or an object with `.loss`.
        count_tokens: `batch -> int`, for the records. By default the elements of the batch's first tensor
            of integers, else the length of its first tensor.
        accumulate: Micro-batches per step, taken from `data` one by one.
        hooks: Called on every rank: `after_step(trainer, record)` and `after_publish(trainer, path)` where
            a hook has them; a hook that has neither is called after each step.
        metrics_path: The file of records; `metrics.jsonl` in the store's root by default, but where that is an object
            store it has to be given: objects can't be appended to. Written by rank 0.
        progress_bar: Whether rank 0 shows one, on a terminal.

    Attributes:
        progress: The run's `Progress`.
        data: The `DataStream` over the given data.
    """

    def __init__(
        self,
        engine: TrainEngine,
        store: CheckpointStore | str | os.PathLike[str],
        data: Iterable[Any],
        *,
        total_steps: int,
        save_every: int,
        resume: LoadCheckpointConfig | str | os.PathLike[str] | None = None,
        policy: LoadPolicy | None = None,
        load_args: bool = True,
        loss_fn: LossFn | None = None,
        count_tokens: Callable[[Any], int] | None = None,
        accumulate: int = 1,
        hooks: Sequence[Any] = (),
        metrics_path: str | os.PathLike[str] | None = None,
        progress_bar: bool = True,
    ) -> None:
        require_engine(engine)
        with engine.ranks.asked("build the trainer"):
            require_options(policy=policy, load_args=load_args)
            for name, value in (
                ("total_steps", total_steps),
                ("save_every", save_every),
                ("accumulate", accumulate),
            ):
                require_count(name, value, 1)
            for name, function in (("loss_fn", loss_fn), ("count_tokens", count_tokens)):
                if function is not None:
                    require_callable(name, function, "a function")
            require_kind("data", data, Iterable, "iterable, once per epoch, such as a DataLoader")
            require_kind("hooks", hooks, Iterable, "a sequence of hooks", "hooks=[hook]")
            self.engine = engine
            self.store = store if isinstance(store, CheckpointStore) else CheckpointStore(store)
            self.total_steps = total_steps
            self.save_every = save_every
            self.accumulate = accumulate
            self.hooks = tuple(hooks)
            self.metrics = MetricsLog(
                _metrics_path(self.store) if metrics_path is None else Path(metrics_path)
            )
            self.data = DataStream(data)
            self.progress = Progress()
            self._start_from = _start_from(resume)
            self._policy = policy or LoadPolicy()
            self._load_args = load_args
            self._loss_fn = loss_fn or call_model
            self._count_tokens = count_tokens or count_tokens_of
            self._progress_bar = progress_bar and engine.ranks.is_coordinator
            own = {"data": self.data, "progress": self.progress, "rng": RngState()}
            _require_free_names(engine.parts, own)
        # Not before every rank's arguments hold: nothing of the engine has changed till then.
        for name, part in own.items():
            # At the end, `rng` last: restoring another part may draw from the streams.
            engine.parts.pop(name, None)
            engine.parts[name] = part

    def run(self) -> bool:
        """Resumes where there is something to resume from, and trains on.

        SIGTERM on any rank ends the run early on all of them: they agree on the step, finish it and publish
        its checkpoint. The signal's previous handler is put back at the end. (`torchrun`, when it was told to
        end, returns 1 whatever its workers return.)

        Returns:
            True when `total_steps` is reached; False when a signal ended the run early.
        """
        with sigterm() as asked, progress_bar(self._progress_bar, self.total_steps) as show:
            self._resume()
            stopped = False
            while self.progress.step < self.total_steps and not stopped:
                record, stopped = self._step(asked)
                self._call_hooks("after_step", record)
                show(record)
                if stopped or record.step % self.save_every == 0 or record.step == self.total_steps:
                    self._save()
        if stopped:
            self._warn(
                "SIGTERM: step %d is saved; the run ends here, and `run` returns False", self.progress.step
            )
        return not stopped

    def _resume(self) -> None:
        # A policy that is meant for the start from another run must not make this one step 0 again.
        policy = replace(self._policy, skip_parts=self._policy.skip_parts - {"progress"})
        own = self.store.resume(self.engine, policy=policy, load_args=self._load_args)
        if own is not None:
            self._say("resumed from %s", own.path)
            self._tell_of_differences(own.report)
            if own.report.scheduled_rates:
                put_rates(self.engine.scheduler.optimizer, own.report.scheduled_rates)
                self._say(
                    "learning rates are set to where the schedule stands: %s", own.report.scheduled_rates
                )
        elif self._start_from.checkpoint_path is not None:
            self._start_elsewhere(self._start_from.checkpoint_path)
        ranks, step = self.engine.ranks, self.progress.step
        ranks.on_coordinator("prepare the metrics", lambda: self.metrics.rewind(step))
        if step >= self.total_steps:
            self._warn("already complete: step %d of %d is done, nothing to do", step, self.total_steps)

    def _tell_of_differences(self, report: LoadReport) -> None:
        """What the script says and the checkpoint says otherwise; where a scheduler has moved a value, neither does."""
        moved = scheduled_keys(self.engine.optimizers)
        differ = [str(each) for each in report.differences if each.key not in moved]
        if differ and self._load_args:
            self._warn(
                "the checkpoint's hyperparameters win over this script's (Trainer(load_args=False) keeps the "
                "script's): %s",
                "; ".join(differ),
            )
        elif differ:
            self._say("this script's hyperparameters stay: %s", "; ".join(differ))

    def _start_elsewhere(self, path: Path | str) -> None:
        config = self._start_from
        schedule = schedule_of(self.engine.optimizers)
        try:
            self.engine.load_dcp(
                path,
                load_states=config.load_optimizer_states,
                load_args=config.load_optimizer_args and self._load_args,
                policy=replace(self._policy, skip_parts=self._policy.skip_parts | config.skip_parts),
            )
        except CheckpointMismatch as error:
            # A policy would hold for the run's own checkpoints as well; the config is for this start alone.
            todo = f"{error.todo}; for this start alone, resume=LoadCheckpointConfig(...) says what is not to be loaded"
            raise CheckpointMismatch(
                error.what, where=error.where, expected=error.expected, found=error.found, todo=todo
            ) from None
        if not config.load_scheduler and self.engine.scheduler is not None:
            put_schedule_back(self.engine.optimizers, schedule)
        self._say("; ".join([f"started from {path}", *config.clean_starts(self.total_steps)]))

    def _step(self, asked: threading.Event) -> tuple[StepRecord, bool]:
        """One step on every rank; also whether any rank was asked to stop, agreed by all."""
        began = time.perf_counter()
        batches = self.data.take(self.accumulate)
        lr = learning_rates(self.engine.optimizers)
        loss = self.engine.train_step(batches, self._loss_fn)
        norm = self.engine.clip_grad_norm()
        stepped = self.engine.step_optimizer(norm)
        if self.engine.scheduler is not None:
            self.engine.scheduler.step()
        tokens = sum(map(self._count_tokens, batches))
        everyone = self.engine.ranks.gather((loss, tokens, asked.is_set()))
        self.progress.step += 1
        self.progress.tokens += sum(tokens for _, tokens, _ in everyone)
        self.progress.skipped += not stepped
        record = StepRecord(
            step=self.progress.step,
            # Added one by one: from Python 3.12 on, sum() compensates, and the bits would depend on the
            # version.
            loss=reduce(operator.add, (loss for loss, _, _ in everyone)) / len(everyone),
            grad_norm=float(norm),
            lr=lr,
            tokens=self.progress.tokens,
            seconds=time.perf_counter() - began,
            skipped=not stepped,
        )
        if self.engine.ranks.is_coordinator:
            self.metrics.append(record)
        return record, any(stop for _, _, stop in everyone)

    def _save(self) -> None:
        # A published checkpoint promises every record up to its step.
        self.engine.ranks.on_coordinator("sync the metrics", self.metrics.make_durable)
        path = self.store.save(self.engine, self.progress.step)
        self._call_hooks("after_publish", path)

    def _call_hooks(self, name: str, what: StepRecord | Path | Url) -> None:
        for hook in self.hooks:
            method = getattr(hook, name, None)
            if method is not None:
                method(self, what)
            elif name == "after_step" and not hasattr(hook, "after_publish"):
                hook(self, what)

    def _say(self, text: str, *values: object) -> None:
        if self.engine.ranks.is_coordinator:
            _log.info(text, *values)

    def _warn(self, text: str, *values: object) -> None:
        if self.engine.ranks.is_coordinator:
            _log.warning(text, *values)


def _start_from(resume: LoadCheckpointConfig | str | os.PathLike[str] | None) -> LoadCheckpointConfig:
    if isinstance(resume, LoadCheckpointConfig):
        return resume
    kinds = (str, os.PathLike, NoneType)
    require_kind("resume", resume, kinds, "a LoadCheckpointConfig, or a checkpoint's path")
    return LoadCheckpointConfig(checkpoint_path=None if resume is None else os.fspath(resume))


def _metrics_path(store: CheckpointStore) -> Path:
    if isinstance(store.root, Url):
        raise ValueError(f"metrics can't be appended to in {store.root}: give a local metrics_path")
    return store.root / "metrics.jsonl"


def _require_free_names(parts: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    for name, part in own.items():
        if name in parts and not isinstance(parts[name], type(part)):
            raise ValueError(f"the part name {name!r} is the trainer's own; give the engine's another name")
