"""An optimizer with load hooks: they change what is loaded, and torch's casts and new objects do not."""

import pytest
import torch
from torch import nn

from orlop import SwapAdamW, TrainEngine


class Averaged(torch.optim.Optimizer):
    """Keeps float32 state for parameters of any dtype."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["mean"] = torch.zeros_like(param, dtype=torch.float32)
                    state["step"] = torch.tensor(0.0)
                state["mean"].lerp_(param.grad.float(), 1 / 3)
                state["step"] += 1
                param.add_(state["mean"].to(param.dtype), alpha=-float(group["lr"]))


def make(seed, kind=Averaged, **options):
    torch.manual_seed(seed)
    model = nn.Linear(3, 2, dtype=torch.bfloat16)
    return TrainEngine(model, kind(model.parameters(), **options))


def train(engine):
    (optimizer,) = engine.optimizers.values()
    for _ in range(2):
        engine.model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return engine, optimizer


def saved(path, **options):
    engine, optimizer = train(make(0, **options))
    engine.save_dcp(path)
    return engine, optimizer


@pytest.mark.parametrize("has_state", [True, False])
def test_state_keeps_its_dtype_and_live_objects_stay(tmp_path, has_state):
    first, source = saved(tmp_path / "x", lr=torch.tensor(0.3))
    rate = torch.tensor(0.9)
    second = make(1, lr=rate)
    (optimizer,) = second.optimizers.values()
    if has_state:
        train(second)
    groups, group, slots = optimizer.param_groups, optimizer.param_groups[0], dict(optimizer.state)
    slots = {param: dict(state) for param, state in slots.items()}
    seen = []
    optimizer.register_load_state_dict_pre_hook(lambda *_: None)
    optimizer.register_load_state_dict_post_hook(
        lambda o: seen.extend(s["mean"].dtype for s in o.state.values())
    )
    report = second.load_dcp(tmp_path / "x")
    assert report.of("through")
    assert seen == [torch.float32] * 2
    for ours, theirs in zip(second.model.parameters(), first.model.parameters()):
        state = optimizer.state[ours]
        assert state["mean"].dtype == torch.float32
        assert torch.equal(state["mean"], source.state[theirs]["mean"])
        assert state["step"] == 2
        assert all(state[key] is slot for key, slot in slots.get(ours, {}).items())
    assert optimizer.param_groups is groups
    assert optimizer.param_groups[0] is group
    assert group["lr"] is rate
    assert rate.item() == pytest.approx(0.3)
    # Only while loading.
    assert len(optimizer._optimizer_load_state_dict_pre_hooks) == 1
    assert len(optimizer._optimizer_load_state_dict_post_hooks) == 1
    train(first), train(second)
    assert all(map(torch.equal, first.model.parameters(), second.model.parameters()))


def test_what_a_hook_makes_of_state_and_groups_is_kept(tmp_path):
    saved(tmp_path / "x", lr=0.3)
    second = make(1)
    (optimizer,) = second.optimizers.values()
    group = optimizer.param_groups[0]

    def change(_, state_dict):
        state = {
            key: {"mean": entry["mean"].double(), "more": [entry["mean"] * 2], "step": entry["step"]}
            for key, entry in state_dict["state"].items()
        }
        groups = [{"params": each["params"], "lr": each["lr"] * 2} for each in state_dict["param_groups"]]
        return {"state": state, "param_groups": groups}

    optimizer.register_load_state_dict_pre_hook(change)
    group["gone"] = 1
    second.load_dcp(tmp_path / "x")
    for state in optimizer.state.values():
        assert state["mean"].dtype == torch.float64
        assert state["more"][0].dtype == torch.float32
        assert torch.equal(state["more"][0], 2 * state["mean"].float())
    assert optimizer.param_groups[0] is group
    assert group["lr"] == 0.6
    assert "gone" not in group


def test_hooks_that_fail_leave_none_of_ours(tmp_path):
    saved(tmp_path / "x")
    second = make(1)
    (optimizer,) = second.optimizers.values()

    def fail(*_):
        raise ValueError("no")

    optimizer.register_load_state_dict_pre_hook(fail)
    with pytest.raises(RuntimeError, match="ValueError: no"):
        second.load_dcp(tmp_path / "x")
    assert list(optimizer._optimizer_load_state_dict_pre_hooks.values()) == [fail]
    assert not optimizer._optimizer_load_state_dict_post_hooks


def test_host_resident_state_goes_through_its_own_door(tmp_path):
    first, source = saved(tmp_path / "x", kind=SwapAdamW)
    second = make(1, kind=SwapAdamW)
    (optimizer,) = second.optimizers.values()
    group, calls = optimizer.param_groups[0], []
    optimizer.register_load_state_dict_pre_hook(lambda _, state: calls.append(len(state["state"])))
    second.load_dcp(tmp_path / "x")
    assert calls == [2]
    assert optimizer.param_groups[0] is group
    optimizer.synchronize()
    source.synchronize()
    for ours, theirs in zip(second.model.parameters(), first.model.parameters()):
        assert torch.equal(optimizer.state[ours]["exp_avg"], source.state[theirs]["exp_avg"])
