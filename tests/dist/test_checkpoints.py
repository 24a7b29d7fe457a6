"""CheckpointStore on two real ranks: one choice for all, one error for all."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import orlop
from orlop.errors import CheckpointExists, CheckpointIncomplete, CheckpointNotFound, OrlopError
from orlop.store import files, publish
from orlop.testing import run_ranks

pytestmark = pytest.mark.dist


def build(lr: float = 0.1) -> tuple[nn.Module, orlop.TrainEngine]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    return model, orlop.TrainEngine(model, orlop.SwapAdamW(model.parameters(), lr=lr))


def step(model: nn.Module, engine: orlop.TrainEngine) -> None:
    engine.train_step([torch.ones(2, 4)], lambda model, batch: model(batch).square().mean())
    engine.step_optimizer(engine.clip_grad_norm())


def error_of(act: Any) -> tuple[str, str]:
    try:
        act()
    except OrlopError as error:
        return type(error).__name__, str(error)
    return "none", ""


def save_and_resume(rank: int, root: Path) -> dict[str, Any]:
    model, engine = build()
    store = orlop.CheckpointStore(root, keep_last=2)
    fresh = store.resume(engine)
    weights = {}
    for number in (1, 2, 3):
        step(model, engine)
        store.save(engine, number)
        weights[number] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    other_model, other = build(lr=0.5)
    resumed = store.resume(other)
    assert resumed is not None
    newest = all(torch.equal(tensor, weights[3][name]) for name, tensor in other_model.state_dict().items())
    earlier = store.resume(other, step=2)
    assert earlier is not None
    second = all(torch.equal(tensor, weights[2][name]) for name, tensor in other_model.state_dict().items())
    # Only now has the coordinator taken away the sign that it reads.
    engine.ranks.gather(None)
    return {
        "fresh": fresh,
        "steps": store.steps(),
        "resumed": (resumed.step, resumed.path, earlier.step),
        "equal": (newest, second),
        "names": sorted(path.name for path in root.iterdir()),
    }


def test_both_ranks_save_and_resume_the_same(tmp_path: Path) -> None:
    one, two = run_ranks(save_and_resume, 2, tmp_path)
    assert one == two
    assert one == {
        "fresh": None,
        "steps": [2, 3],
        "resumed": (3, tmp_path / "step-00000003", 2),
        "equal": (True, True),
        "names": ["step-00000002", "step-00000003"],
    }


def refusals(rank: int, root: Path) -> list[tuple[str, str]]:
    model, engine = build()
    store = orlop.CheckpointStore(root)
    step(model, engine)
    store.save(engine, 1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = [
        error_of(lambda: store.resume(engine, step=7)),
        error_of(lambda: store.resume(engine, step=9)),
        error_of(lambda: store.save(engine, 1)),
    ]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    step(model, engine)
    store.save(engine, 2)
    return found


def test_a_refusal_is_the_same_typed_error_on_both_ranks(tmp_path: Path) -> None:
    (tmp_path / "step-00000009").mkdir()
    one, two = run_ranks(refusals, 2, tmp_path)
    assert one == two
    kinds = (CheckpointNotFound, CheckpointIncomplete, CheckpointExists)
    assert [kind for kind, _ in one] == [kind.__name__ for kind in kinds]
    for (_, text), name in zip(one, ("step-00000007", "step-00000009", "step-00000001")):
        assert str(tmp_path / name) in text
        assert "rank 0" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-00000001",
        "step-00000002",
        "step-00000009",
    ]


# -- C22: what another node sees -----------------------------------------------------------------------------


def save_into(rank: int, roots: list[Path]) -> tuple[str, str, list[int]]:
    publish.VISIBLE_SECONDS = 0.3
    _, engine = build()
    # One path for all, and another directory behind it on one node.
    os.chdir(roots[rank].parent)
    store = orlop.CheckpointStore(roots[rank].name)
    kind, text = error_of(lambda: store.save(engine, 1))
    return kind, text, store.steps()


def test_c22_a_root_that_is_not_shared_is_named_at_the_first_save(tmp_path: Path) -> None:
    roots = [tmp_path / "node0" / "run", tmp_path / "node0" / "run", tmp_path / "node1" / "run"]
    for root in roots[1:]:
        root.parent.mkdir()
    for kind, text, steps in run_ranks(save_into, 3, roots):
        assert kind == "RootNotShared"
        assert "rank 2" in text
        assert socket.gethostname() in text
        assert str(roots[2]) in text
        assert steps == []
    assert list(roots[0].iterdir()) == []
    assert not roots[2].exists()


def save_late(rank: int, root: Path) -> list[int]:
    """This node's client shows a new directory only after a while."""
    see, looks = files.is_directory, []

    def slow(path: Path) -> bool:
        looks.append(path)
        return len(looks) > 3 * rank and see(path)

    files.is_directory = slow  # type: ignore[assignment]
    _, engine = build()
    store = orlop.CheckpointStore(root)
    store.save(engine, 1)
    assert len(looks) == 3 * rank + 1
    return store.steps()


def test_c22_ranks_wait_until_they_see_the_directory(tmp_path: Path) -> None:
    assert run_ranks(save_late, 4, tmp_path / "run") == [[1]] * 4
