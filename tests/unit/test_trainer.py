"""Trainer on one rank: interrupted equals uninterrupted, where a run starts, what it leaves behind, how it
stops."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from orlop.checkpoints import CheckpointStore
from orlop.configs import LoadCheckpointConfig
from orlop.engine import TrainEngine
from orlop.errors import CheckpointMismatch, CheckpointNotFound
from orlop.optim.swap import SwapAdamW
from orlop.resume import LoadPolicy
from orlop.state.plain import digest
from orlop.state.rng import RngState
from orlop.trainer import Trainer

TOTAL = 12


class Interrupted(Exception):
    pass


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        # Python's and NumPy's streams count too.
        noise = random.random() + np.random.rand()
        return (self.layers(x).squeeze(-1) - y + 0.1 * noise).square().mean()


def _data(kind: type) -> DataLoader:
    x = torch.arange(40.0).view(10, 4) / 40
    return kind(TensorDataset(x, x.sum(1)), batch_size=2, shuffle=True)


def _trainer(
    root: Path, *, seed: int = 0, lr: float = 0.05, kind: type = StatefulDataLoader, **options: Any
) -> Trainer:
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
    model = Net()
    groups = [
        {"params": model.layers[0].parameters(), "lr": lr / 2},
        {"params": model.layers[2].parameters()},
    ]
    optimizer = SwapAdamW(groups, lr=lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    engine = TrainEngine(model, optimizer, scheduler, max_grad_norm=1.0)
    options = {"total_steps": TOTAL, "save_every": 3, "accumulate": 2} | options
    return Trainer(engine, CheckpointStore(root), _data(kind), **options)


def _stop_at(step: int | None) -> Callable[..., None]:
    def stop(trainer: Trainer, record: Any) -> None:
        if record.step == step:
            raise Interrupted

    return stop


def _terminate_at(step: int) -> Callable[..., None]:
    def terminate(trainer: Trainer, record: Any) -> None:
        if record.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return terminate


def _lines(root: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]


def _outcome(trainer: Trainer) -> tuple[Any, ...]:
    """Everything that must be equal, in exact form."""
    lines = [
        {
            key: value.hex() if type(value) is float else value
            for key, value in line.items()
            if key != "seconds"
        }
        for line in _lines(trainer.store.root)
    ]
    (optimizer,) = trainer.engine.optimizers.values()
    tensors = [p.detach().clone() for p in trainer.engine.model.parameters()]
    tensors += [
        optimizer.state[p][key].clone()
        for p in trainer.engine.model.parameters()
        for key in optimizer.state[p]
    ]
    return lines, tensors, trainer.progress, RngState().state_dict(), digest(trainer.data.state_dict())


def _assert_same(found: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    assert found[0] == expected[0]
    assert all(torch.equal(a, b) for a, b in zip(found[1], expected[1], strict=True))
    assert found[2:] == expected[2:]


@pytest.fixture(autouse=True)
def _streams():
    before, handler = RngState().state_dict(), signal.getsignal(signal.SIGTERM)
    yield
    RngState().load_state_dict(before)
    assert signal.getsignal(signal.SIGTERM) is handler


@pytest.mark.parametrize("kind", [StatefulDataLoader, DataLoader])
@pytest.mark.parametrize("killed_after", [[4], [6], [1, 5, 8], [11], [12]])
def test_interrupted_equals_uninterrupted(tmp_path: Path, kind: type, killed_after: list[int]) -> None:
    whole = _trainer(tmp_path / "whole", kind=kind)
    assert whole.run()
    expected = _outcome(whole)
    for attempt, stop in enumerate([*killed_after, None]):
        # Where there is something to resume from, nothing else that the process starts with may matter.
        other = {"seed": 50 + attempt, "lr": 9.0} if CheckpointStore(tmp_path / "cut").steps() else {}
        resumed = _trainer(tmp_path / "cut", kind=kind, hooks=[_stop_at(stop)], **other)
        with pytest.raises(Interrupted) if stop else nullcontext():
            resumed.run()
    assert other, "nothing was saved: two fresh starts would be compared"
    _assert_same(_outcome(resumed), expected)
    assert [line["step"] for line in _lines(tmp_path / "cut")] == list(range(1, TOTAL + 1))


def test_a_run_that_is_done_does_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _trainer(tmp_path).run()
    before = (tmp_path / "metrics.jsonl").read_bytes()
    again = _trainer(tmp_path, seed=3)
    with caplog.at_level(logging.WARNING, logger="orlop"):
        assert again.run()
    assert again.progress.step == TOTAL
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert f"already complete: step {TOTAL} of {TOTAL} is done, nothing to do" in caplog.text


def _interrupted(root: Path, **options: Any) -> None:
    with pytest.raises(Interrupted):
        _trainer(root, hooks=[_stop_at(7)], **options).run()


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def test_hyperparameters_that_the_script_changed_are_told_and_those_that_the_schedule_moved_are_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _interrupted(tmp_path)
    _interrupted(tmp_path)
    assert _warnings(caplog) == []
    again = _trainer(tmp_path, lr=0.1)
    again.engine.optimizers["optimizer"].param_groups[1]["eps"] = 0.5
    assert again.run()
    assert _warnings(caplog) == [
        "the checkpoint's hyperparameters win over this script's (Trainer(load_args=False) keeps the script's): "
        "optimizer[0] initial_lr: 0.05 -> 0.025; optimizer[1] eps: 0.5 -> 1e-08; "
        "optimizer[1] initial_lr: 0.1 -> 0.05"
    ]
    assert _lines(tmp_path)[-1]["lr"] == [0.025 / 12, 0.05 / 12]


def test_load_args_off_keeps_the_scripts_hyperparameters(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _interrupted(tmp_path)
    again = _trainer(tmp_path, lr=0.1, load_args=False)
    again.engine.optimizers["optimizer"].param_groups[1]["eps"] = 0.5
    with caplog.at_level(logging.INFO, logger="orlop"):
        assert again.run()
    assert again.engine.optimizers["optimizer"].param_groups[1]["eps"] == 0.5
    assert "this script's hyperparameters stay: " in caplog.text
    # The schedule goes on at its place, from this script's rates: not one step is taken at those of step 1.
    assert [line["lr"] for line in _lines(tmp_path)[7:]] == [
        pytest.approx([0.05 / step, 0.1 / step], rel=1e-12) for step in range(8, 13)
    ]


def test_a_path_stands_for_a_store_and_for_a_first_start(tmp_path: Path, elsewhere: Path) -> None:
    whole = _trainer(tmp_path / "whole")
    trainer = Trainer(
        whole.engine,
        str(tmp_path / "run"),
        whole.data.data,
        total_steps=7,
        save_every=7,
        resume=str(elsewhere),
    )
    assert trainer.run()
    assert [line["step"] for line in _lines(tmp_path / "run")] == [7]
    assert trainer.store.steps() == [7]


@pytest.mark.parametrize(
    "options, said",
    [
        ({"policy": {"skip_parts": ["rng"]}}, "policy must be a LoadPolicy; it is of type dict"),
        ({"load_args": "no"}, "load_args must be True or False; it is 'no'"),
        ({"total_steps": "5"}, r"total_steps must be an int; it is '5': write int\(total_steps\)"),
        ({"save_every": True}, "save_every must be an int; it is True"),
        ({"loss_fn": 3}, "loss_fn must be a function; it is 3"),
        ({"hooks": print}, r"hooks must be a sequence of hooks; it is .*: write hooks=\[hook\]"),
        ({"resume": 3}, "resume must be a LoadCheckpointConfig, or a checkpoint's path; it is 3"),
    ],
)
def test_an_argument_of_another_type_is_named(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        _trainer(tmp_path, **options)


def test_what_stands_in_an_arguments_place_is_named(tmp_path: Path) -> None:
    engine, rest = _trainer(tmp_path).engine, {"total_steps": 2, "save_every": 2}
    with pytest.raises(TypeError, match="engine must be a TrainEngine; it is of type Net"):
        Trainer(engine.model, tmp_path, [], **rest)
    with pytest.raises(
        TypeError, match="data must be iterable, once per epoch, such as a DataLoader; it is None"
    ):
        Trainer(engine, tmp_path, None, **rest)
    with pytest.raises(TypeError, match=r"root must be a path: .*; it is 3"):
        Trainer(engine, 3, [], **rest)


def test_a_checkpoint_in_the_place_of_the_run_is_refused(tmp_path: Path) -> None:
    _trainer(tmp_path, total_steps=3).run()
    inside = tmp_path / "step-00000003"
    before = sorted(path.name for path in inside.iterdir())
    for start in (_trainer(inside).run, lambda: CheckpointStore(inside).save(_trainer(inside).engine, 4)):
        with pytest.raises(CheckpointNotFound, match="this is a checkpoint, not a run's directory") as caught:
            start()
        assert str(inside) in caught.value.where
        assert "give the directory above it" in caught.value.todo
    assert sorted(path.name for path in inside.iterdir()) == before


def test_it_saves_when_due_and_at_the_end(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, total_steps=7)
    trainer.store.keep_last = None
    trainer.run()
    assert trainer.store.steps() == [3, 6, 7]


def test_records(tmp_path: Path) -> None:
    seen: list[Any] = []
    _trainer(
        tmp_path, hooks=[lambda trainer, record: seen.append(record)], count_tokens=lambda batch: 5
    ).run()
    lines = _lines(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, TOTAL + 1)) == [record.step for record in seen]
    assert [line["tokens"] for line in lines] == [10 * step for step in range(1, TOTAL + 1)]
    assert lines[0]["lr"] == [0.025, 0.05]
    assert lines[1]["lr"] == [0.0125, 0.025]
    assert all(line["seconds"] > 0 and not line["skipped"] and line["grad_norm"] > 0 for line in lines)
    assert [line["loss"].hex() for line in lines] == [record.loss.hex() for record in seen]


def test_a_skipped_step_is_counted_and_told(tmp_path: Path) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        loss = model(*batch)
        return loss * float("nan") if trainer.progress.step == 2 else loss

    trainer = _trainer(tmp_path, loss_fn=loss_fn)
    trainer.run()
    assert [line["step"] for line in _lines(tmp_path) if line["skipped"]] == [3]
    assert trainer.progress.skipped == 1
    assert all(torch.isfinite(p).all() for p in trainer.engine.model.parameters())


def test_hooks_of_both_forms(tmp_path: Path) -> None:
    class Hook:
        def __init__(self) -> None:
            self.steps: list[int] = []
            self.published: list[Path] = []

        def after_step(self, trainer: Trainer, record: Any) -> None:
            self.steps.append(record.step)

        def after_publish(self, trainer: Trainer, path: Path) -> None:
            assert (path / ".metadata").exists()
            self.published.append(path)

    hook = Hook()
    trainer = _trainer(tmp_path, total_steps=4, hooks=[hook])
    trainer.run()
    assert hook.steps == [1, 2, 3, 4]
    assert hook.published == [trainer.store.path(3), trainer.store.path(4)]


def test_records_are_durable_before_the_checkpoint_is_published(tmp_path: Path) -> None:
    from orlop.store import files

    seen: list[files.Operation] = []
    with files.observed(seen.append):
        _trainer(tmp_path, total_steps=3).run()
    metrics = tmp_path / "metrics.jsonl"
    synced = max(i for i, each in enumerate(seen) if each.kind == "fsync" and each.path == metrics)
    published = max(
        i
        for i, each in enumerate(seen)
        if each.kind == "rename" and each.target == tmp_path / "step-00000003"
    )
    appended = max(i for i, each in enumerate(seen) if each.kind == "append" and each.path == metrics)
    assert appended < synced < published


# ---- a first start from elsewhere ----


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A checkpoint of another run at step 6, lr 0.05."""
    trainer = _trainer(tmp_path / "other", hooks=[_stop_at(7)])
    with pytest.raises(Interrupted):
        trainer.run()
    return trainer.store.path(6)


def test_a_first_start_from_elsewhere_takes_everything(tmp_path: Path, elsewhere: Path) -> None:
    whole = _trainer(tmp_path / "whole")
    whole.run()
    config = LoadCheckpointConfig(checkpoint_path=elsewhere)
    branch = _trainer(tmp_path / "branch", seed=4, lr=9.0, resume=config)
    assert branch.run()
    lines, *rest = _outcome(branch)
    expected, *expected_rest = _outcome(whole)
    _assert_same((lines, *rest), (expected[6:], *expected_rest))


def test_its_own_checkpoint_comes_before_elsewhere(tmp_path: Path, elsewhere: Path) -> None:
    config = LoadCheckpointConfig(checkpoint_path=elsewhere, load_scheduler=False)
    first = _trainer(tmp_path / "own", resume=config, hooks=[_stop_at(4)])
    with pytest.raises(Interrupted):
        first.run()
    again = _trainer(tmp_path / "own", resume=config, hooks=[_stop_at(4)])
    with pytest.raises(Interrupted):
        again.run()
    assert [line["step"] for line in _lines(tmp_path / "own")] == [1, 2, 3, 4]


def test_what_is_switched_off_starts_cleanly(
    tmp_path: Path, elsewhere: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = LoadCheckpointConfig(
        checkpoint_path=elsewhere,
        load_optimizer_states=False,
        load_optimizer_args=False,
        load_dataset=False,
        load_scheduler=False,
    )
    seen: dict[str, Any] = {}

    def first_step(trainer: Trainer, record: Any) -> None:
        if record.step == 1:
            (optimizer,) = trainer.engine.optimizers.values()
            seen["steps"] = {float(state["step"]) for state in optimizer.state.values()}
            seen["batches"] = trainer.data.batches

    trainer = _trainer(tmp_path / "tuned", lr=0.01, resume=config, hooks=[first_step])
    with caplog.at_level(logging.INFO, logger="orlop"):
        assert trainer.run()
    lines = _lines(tmp_path / "tuned")
    assert [line["step"] for line in lines] == list(range(1, TOTAL + 1))
    assert lines[0]["lr"] == [0.005, 0.01]
    assert lines[1]["lr"] == [0.0025, 0.005]
    assert seen == {"steps": {1.0}, "batches": 2}
    (text,) = (r.getMessage() for r in caplog.records if "started from" in r.getMessage())
    assert str(elsewhere) in text
    for what in (
        "fresh optimizer",
        "hyperparameters",
        "data starts from the beginning",
        f"over {TOTAL} steps",
    ):
        assert what in text


def test_weights_and_moments_are_taken_while_the_schedule_starts_anew(
    tmp_path: Path, elsewhere: Path
) -> None:
    steps: set[float] = set()

    def first_step(trainer: Trainer, record: Any) -> None:
        (optimizer,) = trainer.engine.optimizers.values()
        if record.step == 1:
            steps.update(float(state["step"]) for state in optimizer.state.values())

    config = LoadCheckpointConfig(checkpoint_path=elsewhere, load_scheduler=False)
    _trainer(tmp_path / "tuned", lr=0.01, resume=config, hooks=[first_step]).run()
    lines = _lines(tmp_path / "tuned")
    assert steps == {7.0}
    assert lines[0]["lr"] == [0.005, 0.01], "the fresh scheduler's, not those in the checkpoint's groups"
    assert len(lines) == TOTAL


# ---- stopping ----


def test_sigterm_finishes_the_step_publishes_and_leaves(tmp_path: Path) -> None:
    whole = _trainer(tmp_path / "whole")
    whole.run()
    expected = _outcome(whole)
    stopped = _trainer(tmp_path / "cut", hooks=[_terminate_at(4)])
    assert stopped.run() is False
    assert stopped.store.steps()[-1] == 5  # told after step 4 was agreed on: step 5 is finished and saved
    resumed = _trainer(tmp_path / "cut", seed=5)
    assert resumed.run()
    _assert_same(_outcome(resumed), expected)


def test_sigterm_during_a_step_ends_with_that_step(tmp_path: Path) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        if trainer.progress.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return model(*batch)

    trainer = _trainer(tmp_path, loss_fn=loss_fn)
    assert trainer.run() is False
    assert trainer.store.steps()[-1] == 5 == trainer.progress.step
    assert len(_lines(tmp_path)) == 5


def test_the_previous_handler_is_put_back_even_after_an_error(tmp_path: Path) -> None:
    calls: list[int] = []
    previous = signal.signal(signal.SIGTERM, lambda number, frame: calls.append(number))
    mine = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(Interrupted):
            _trainer(tmp_path, hooks=[_stop_at(1)]).run()
        assert signal.getsignal(signal.SIGTERM) is mine
        os.kill(os.getpid(), signal.SIGTERM)
        assert calls == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, previous)


def test_it_runs_outside_the_main_thread(tmp_path: Path) -> None:
    done: list[bool] = []
    thread = threading.Thread(target=lambda: done.append(_trainer(tmp_path, total_steps=2).run()))
    thread.start()
    thread.join(60)
    assert done == [True]


# ---- what is refused ----


@pytest.mark.parametrize("option", ["total_steps", "save_every", "accumulate"])
def test_numbers_below_one_are_refused(tmp_path: Path, option: str) -> None:
    with pytest.raises(ValueError, match=option):
        _trainer(tmp_path, **{option: 0})


def test_a_part_name_of_the_trainers_own_is_refused(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path)
    trainer.engine.parts["rng"] = trainer.progress
    with pytest.raises(ValueError, match="'rng'"):
        Trainer(trainer.engine, trainer.store, [1], total_steps=1, save_every=1)
    assert trainer.engine.parts["rng"] is trainer.progress


def test_a_policy_that_is_left_in_the_script_never_begins_a_run_anew(tmp_path: Path) -> None:
    whole = _trainer(tmp_path / "whole")
    assert whole.run()
    _interrupted(tmp_path / "run")
    again = _trainer(tmp_path / "run", policy=LoadPolicy(skip_parts={"progress"}, allow_other_ranks=True))
    assert again.run()
    _assert_same(_outcome(again), _outcome(whole))


def test_a_start_from_a_checkpoint_without_parts_says_what_to_leave_out_for_this_start(
    tmp_path: Path,
) -> None:
    trainer = _trainer(tmp_path / "other")
    model, optimizer = get_state_dict(trainer.engine.model, next(iter(trainer.engine.optimizers.values())))
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / "plain")
    branch = _trainer(tmp_path / "branch", resume=str(tmp_path / "plain"))
    with pytest.raises(CheckpointMismatch, match=r"resume=LoadCheckpointConfig\(\.\.\.\) says"):
        branch.run()
    config = LoadCheckpointConfig(
        checkpoint_path=tmp_path / "plain", load_dataset=False, load_scheduler=False
    )
    assert _trainer(tmp_path / "branch", resume=config).run()
