"""What a swapped class owes to everything that handles optimizers: schedulers, hooks, closures, scalers, copies."""

from __future__ import annotations

import collections
import copy
import gc
import io
import math
import pickle
import subprocess
import sys
import time
import weakref

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import orlop
from orlop.errors import (
    CheckpointMismatch,
    HostMemoryError,
    OptimizerRefused,
    ParameterReplaced,
    StateNotReady,
)
from orlop.optim import swap as swap_module
from orlop.testing import ThreadLink


def make_model(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))


def give_gradients(model, number=0):
    generator = torch.Generator().manual_seed(number)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator)


def pair(**kwargs):
    """The same model twice, with a stock and a swapped AdamW."""
    model, other = make_model(), make_model()
    return (model, orlop.SwapAdamW(model.parameters(), **kwargs)), (
        other,
        torch.optim.AdamW(other.parameters(), **kwargs),
    )


def assert_equal_models(model, other):
    for param, theirs in zip(model.parameters(), other.parameters()):
        assert torch.equal(param, theirs)


def test_it_is_a_subclass_and_made_once():
    assert issubclass(orlop.SwapAdamW, torch.optim.AdamW)
    assert orlop.swap(torch.optim.AdamW) is orlop.SwapAdamW
    assert orlop.swap(torch.optim.RMSprop) is orlop.swap(torch.optim.RMSprop)
    assert orlop.swap(orlop.SwapAdamW) is orlop.SwapAdamW
    assert issubclass(orlop.swap(torch.optim.RMSprop), torch.optim.RMSprop)
    with pytest.raises(OptimizerRefused, match="takes an optimizer class"):
        orlop.swap(torch.nn.Linear)


SCHEDULERS = [
    lambda opt: torch.optim.lr_scheduler.StepLR(opt, 1),
    lambda opt: torch.optim.lr_scheduler.MultiStepLR(opt, [1, 2]),
    lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step)),
    lambda opt: torch.optim.lr_scheduler.MultiplicativeLR(opt, lambda step: 0.9),
    lambda opt: torch.optim.lr_scheduler.ConstantLR(opt),
    lambda opt: torch.optim.lr_scheduler.LinearLR(opt),
    lambda opt: torch.optim.lr_scheduler.ExponentialLR(opt, 0.9),
    lambda opt: torch.optim.lr_scheduler.PolynomialLR(opt),
    lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, 5),
    lambda opt: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(opt, 5),
    lambda opt: torch.optim.lr_scheduler.CyclicLR(opt, 0.1, 0.2, cycle_momentum=False),
    lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=10),
    lambda opt: torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0),
    lambda opt: torch.optim.lr_scheduler.SequentialLR(
        opt,
        [torch.optim.lr_scheduler.ConstantLR(opt), torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)],
        milestones=[2],
    ),
    lambda opt: torch.optim.lr_scheduler.ChainedScheduler([torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)]),
]


@pytest.mark.parametrize("make_scheduler", SCHEDULERS)
def test_every_scheduler_drives_it(make_scheduler):
    """B01."""
    (model, swapped), (other, stock) = pair(lr=0.1)
    schedulers = [make_scheduler(swapped), make_scheduler(stock)]
    for number in range(4):
        for each, optimizer, scheduler in ((model, swapped, schedulers[0]), (other, stock, schedulers[1])):
            give_gradients(each, number)
            optimizer.step()
            scheduler.step(
                *([1.0] if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) else [])
            )
    assert swapped.param_groups[0]["lr"] == stock.param_groups[0]["lr"]
    assert_equal_models(model, other)


def test_a_changed_lr_is_what_the_next_step_uses():
    (model, swapped), (other, stock) = pair()
    for optimizer in (swapped, stock):
        optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    for number in range(3):
        for each, optimizer in ((model, swapped), (other, stock)):
            give_gradients(each, number)
            optimizer.param_groups[0]["lr"].mul_(0.5)
            optimizer.step()
    assert_equal_models(model, other)


def test_frozen_parameters_are_accepted_and_have_no_state():
    """B01."""
    model = make_model()
    model[0].weight.requires_grad_(False)
    before = model[0].weight.clone()
    optimizer = orlop.SwapAdamW(model.parameters())
    assert model[0].weight not in optimizer.state
    for param in model.parameters():
        param.grad = torch.ones_like(param) if param.requires_grad else None
    optimizer.step()
    assert torch.equal(model[0].weight, before)
    assert not optimizer.stepped(model[0].weight)


def test_a_parameter_that_is_unfrozen_later_steps_like_a_new_one():
    (model, swapped), (other, stock) = [
        (m, cls(m.parameters()))
        for m, cls in ((make_model(), orlop.SwapAdamW), (make_model(), torch.optim.AdamW))
        if m[0].weight.requires_grad_(False) is not None
    ]
    for number in range(4):
        for each, optimizer in ((model, swapped), (other, stock)):
            if number == 2:
                each[0].weight.requires_grad_(True)
            give_gradients(each, number)
            if number < 2:
                each[0].weight.grad = None
            optimizer.step()
    assert_equal_models(model, other)
    assert swapped.holds(swapped.state[model[0].weight]["exp_avg"])
    assert swapped.state[model[0].weight]["step"] == 2


def test_hooks_fire_once_a_step_whatever_the_windows():
    model = make_model()
    optimizer = orlop.SwapAdamW(model.parameters(), window_bytes=64)
    optimizer.links[torch.device("cpu")] = ThreadLink()
    torch.optim.AdamW(
        make_model().parameters()
    )  # The stock class's own step is wrapped by its first construction.
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    for _ in range(2):
        give_gradients(model)
        optimizer.step()
    assert calls == ["before", "after"] * 2


def test_the_closure_runs_once_first_with_gradients_enabled():
    model = make_model()
    optimizer = orlop.SwapAdamW(model.parameters(), window_bytes=64)
    optimizer.links[torch.device("cpu")] = ThreadLink()
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = model(torch.ones(2, 6)).square().mean()
        loss.backward()
        return loss

    before = [param.clone() for param in model.parameters()]
    with torch.no_grad():
        loss = optimizer.step(closure)
    assert calls == [True]
    assert loss.requires_grad
    assert not any(torch.equal(param, old) for param, old in zip(model.parameters(), before))


@pytest.mark.parametrize("flags", [{}, {"fused": True}, {"foreach": True}])
def test_grad_scaler_skips_and_unscales_as_with_the_stock_class(flags):
    """B13, on one rank."""
    (model, swapped), (other, stock) = pair(lr=0.1, **flags)
    scalers = [torch.amp.GradScaler("cpu", init_scale=16.0) for _ in range(2)]
    for number in range(4):
        for each, optimizer, scaler in ((model, swapped, scalers[0]), (other, stock, scalers[1])):
            scaler.scale(torch.zeros(()))
            give_gradients(each, number)
            if number == 1:
                each[0].weight.grad[0, 0] = math.inf
            counters = [float(s["step"]) for s in optimizer.state.values()]
            scaler.step(optimizer)
            scaler.update()
            if number == 1:
                assert [float(s["step"]) for s in optimizer.state.values()] == counters
    assert scalers[0].state_dict() == scalers[1].state_dict()
    assert_equal_models(model, other)


def test_a_skipped_first_step_leaves_every_parameter_unstepped():
    model = make_model()
    optimizer = orlop.SwapAdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    scaler.scale(torch.zeros(()))
    give_gradients(model)
    model[0].weight.grad.fill_(math.inf)
    scaler.step(optimizer)
    assert not any(optimizer.stepped(param) for param in model.parameters())


def test_non_finite_gradients_do_what_the_stock_class_does():
    (model, swapped), (other, stock) = pair()
    swapped.window_bytes = 64
    swapped.links[torch.device("cpu")] = ThreadLink()
    for each, optimizer in ((model, swapped), (other, stock)):
        give_gradients(each)
        each[2].weight.grad[0, 0] = math.nan
        optimizer.step()
    swapped.synchronize()
    for param, theirs in zip(model.parameters(), other.parameters()):
        assert torch.equal(param.nan_to_num(7), theirs.nan_to_num(7))
        for key, value in swapped.state[param].items():
            assert torch.equal(value.nan_to_num(7), stock.state[theirs][key].nan_to_num(7))


def test_state_exists_from_construction_so_torch_takes_no_hidden_step():
    """A01."""
    (model, swapped), (other, stock) = pair(lr=0.1)
    calls = []
    swapped.register_step_post_hook(lambda *_: calls.append(1))
    state = get_optimizer_state_dict(model, swapped)
    assert calls == []
    assert all(entry["step"] == 0 for entry in state["state"].values())
    for each, optimizer in ((model, swapped), (other, stock)):
        give_gradients(each)
        optimizer.step()
    assert all(entry["step"] == 1 for entry in swapped.state.values())
    assert_equal_models(model, other)


@pytest.mark.parametrize(
    "name, kwargs", [("SGD", {"momentum": 0.9, "dampening": 0.5}), ("Rprop", {}), ("ASGD", {})]
)
def test_classes_that_make_their_own_state_have_none_before_the_first_step(name, kwargs):
    """A01: and torch's getter does not make them step either."""
    model = make_model()
    optimizer = orlop.swap(getattr(torch.optim, name))(model.parameters(), **kwargs)
    before = [param.clone() for param in model.parameters()]
    assert get_optimizer_state_dict(model, optimizer)["state"] == {}
    assert dict(optimizer.state) == {}
    assert all(torch.equal(param, old) for param, old in zip(model.parameters(), before))
    give_gradients(model)
    optimizer.step()
    assert all(optimizer.holds(v) for entry in optimizer.state.values() for v in entry.values())


@pytest.mark.parametrize(
    "copier", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"]
)
@pytest.mark.parametrize(
    "name, kwargs", [("AdamW", {}), ("SGD", {"momentum": 0.9, "dampening": 0.1}), ("NAdam", {})]
)
def test_copies_continue_as_the_original_and_share_nothing(copier, name, kwargs):
    params = [torch.nn.Parameter(torch.randn(70, 3)), torch.nn.Parameter(torch.randn(4))]
    optimizer = orlop.swap(getattr(torch.optim, name))(params, lr=0.1, window_bytes=4321, **kwargs)
    params[0].grad = torch.randn(70, 3)
    optimizer.step()
    twin = copier(optimizer)
    assert type(twin) is type(optimizer)
    assert twin.window_bytes == 4321
    copies = twin.param_groups[0]["params"]
    assert [twin.stepped(p) for p in copies] == [True, False]
    for mine, theirs in zip(params, copies):
        assert mine.data_ptr() != theirs.data_ptr()
        mine.grad = torch.randn(mine.shape)
        theirs.grad = mine.grad.clone()
    optimizer.step()
    twin.step()
    for mine, theirs in zip(params, copies):
        assert torch.equal(mine, theirs)
        for key, value in optimizer.state[mine].items():
            copied = twin.state[theirs][key]
            assert torch.equal(value, copied)
            assert twin.holds(copied)
            assert not optimizer.holds(copied)


def test_one_moment_does_not_drag_the_arena_along():
    """F12: pickled, copied or saved, a moment is as large as itself."""
    params = [torch.nn.Parameter(torch.zeros(300_000)), torch.nn.Parameter(torch.zeros(10))]
    optimizer = orlop.SwapAdamW(params)
    moment = optimizer.state[params[1]]["exp_avg"]
    assert moment.storage_offset() == 0
    assert moment.untyped_storage().nbytes() == 40
    saved = io.BytesIO()
    torch.save(moment, saved)
    assert len(saved.getvalue()) < 4096
    assert len(pickle.dumps(moment)) < 4096


def test_moments_outlive_their_optimizer():
    param = torch.nn.Parameter(torch.zeros(100_000))
    optimizer = orlop.SwapAdamW([param])
    param.grad = torch.ones_like(param)
    optimizer.step()
    moment = optimizer.state[param]["exp_avg"]
    expected = moment.clone()
    del optimizer
    junk = [torch.rand(100_000) for _ in range(20)]
    assert torch.equal(moment, expected)
    del junk


def test_add_param_group_brings_a_block_of_its_own():
    model, extra = make_model(), torch.nn.Parameter(torch.randn(40, 2))
    optimizer = orlop.SwapAdamW(model.parameters(), lr=0.1)
    pointers = [v.data_ptr() for entry in optimizer.state.values() for v in entry.values()]
    optimizer.add_param_group({"params": [extra], "lr": 0.3})
    assert pointers == [v.data_ptr() for p in model.parameters() for v in optimizer.state[p].values()]
    stock = torch.optim.AdamW([theirs := torch.nn.Parameter(extra.detach().clone())], lr=0.3)
    extra.grad = theirs.grad = torch.randn(40, 2)
    optimizer.step()
    stock.step()
    assert torch.equal(extra, theirs)
    assert all(optimizer.holds(v) for v in optimizer.state[extra].values())


def test_weights_replaced_by_value_take_effect():
    """B06: there is no master copy that could be stale."""
    (model, swapped), (other, stock) = pair(lr=0.1)
    for each, optimizer in ((model, swapped), (other, stock)):
        each.load_state_dict(make_model(seed=9).state_dict())
        optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
        give_gradients(each)
        optimizer.step()
    assert_equal_models(model, make_model(seed=9))
    for each, optimizer in ((model, swapped), (other, stock)):
        optimizer.param_groups[0].update(lr=0.1)
        give_gradients(each, 1)
        optimizer.step()
    assert_equal_models(model, other)


def test_meta_parameters_get_their_state_at_construction_and_a_plain_to_empty_is_named():
    with torch.device("meta"):
        model = make_model()
    optimizer = orlop.SwapAdamW(model.named_parameters())
    moment = optimizer.state[model[0].weight]["exp_avg"]
    assert moment.device.type == "cpu"
    assert not moment.any()
    model.to_empty(device="cpu")
    give_gradients(model)
    with pytest.raises(ParameterReplaced, match=r"0\.weight"):
        optimizer.step()


def test_too_large_an_arena_is_refused_before_anything_is_allocated(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with torch.device("meta"):
        param = torch.nn.Parameter(torch.empty(2**40))
    with pytest.raises(HostMemoryError, match=r"8192\.00 GiB of host memory per rank, 16384\.00 GiB"):
        orlop.SwapAdamW([param])


def test_sparse_gradients_are_named():
    embedding = torch.nn.Embedding(5, 3, sparse=True)
    optimizer = orlop.swap(torch.optim.SGD)(embedding.named_parameters(), momentum=0.9, lr=0.1)
    before = embedding.weight.clone()
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(OptimizerRefused, match="weight"):
        optimizer.step()
    assert torch.equal(embedding.weight, before)


def test_differentiable_is_refused():
    with pytest.raises(OptimizerRefused, match="differentiable"):
        orlop.SwapAdamW(make_model().parameters(), differentiable=True)


def test_state_stays_where_it_is():
    assert orlop.SwapAdamW(make_model().parameters()).put_state_to_device("cpu") is False


@pytest.mark.slow
def test_a_compiled_training_step_runs_the_optimizer_eagerly():
    (model, swapped), (other, stock) = pair(lr=0.1)

    def train(module, optimizer):
        optimizer.zero_grad()
        module(torch.ones(2, 6)).square().mean().backward()
        optimizer.step()

    compiled = torch.compile(train, backend="eager")
    for _ in range(3):
        compiled(model, swapped)
        train(other, stock)
    assert_equal_models(model, other)


def test_the_step_counter_is_the_stored_one_and_no_other():
    """B09: 5001 after one step from 5000; skipped steps and groups that step unequal times don't matter."""
    (model, swapped), (other, stock) = pair(lr=0.1)
    for each, optimizer in ((model, swapped), (other, stock)):
        give_gradients(each)
        optimizer.step()
        state = copy.deepcopy(optimizer.state_dict())
        for entry in state["state"].values():
            entry["step"].fill_(5000)
        optimizer.load_state_dict(state)
        for number in range(3):
            give_gradients(each, number)
            if number == 1:
                each[2].weight.grad = None
            optimizer.step()
    assert [float(swapped.state[p]["step"]) for p in model.parameters()] == [5003, 5003, 5002, 5003]
    assert_equal_models(model, other)


@pytest.mark.parametrize("name", ["AdamW", "NAdam", "RMSprop", "SGD"])
def test_two_hundred_steps_of_training_are_bit_equal(name):
    """B24: through the thread link, in small windows."""
    models = make_model(), make_model()
    optimizer_class = getattr(torch.optim, name)
    kwargs = {"lr": 0.01, "weight_decay": 0.01} | ({"momentum": 0.9} if name == "SGD" else {})
    swapped = orlop.swap(optimizer_class)(models[0].parameters(), window_bytes=300, **kwargs)
    swapped.links[torch.device("cpu")] = ThreadLink()
    stock = optimizer_class(models[1].parameters(), **kwargs)
    for number in range(200):
        batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
        losses = []
        for model, optimizer in zip(models, (swapped, stock)):
            optimizer.zero_grad()
            loss = (model(batch) - batch[:, :3]).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] == losses[1]
    assert_equal_models(*models)


CHECKS_UNDER_O = """
import torch, orlop
from orlop.errors import CheckpointMismatch
assert False, "asserts are off under -O"
p = torch.nn.Parameter(torch.zeros(3))
optimizer = orlop.SwapAdamW([p])
saved = optimizer.state_dict()
pointer = optimizer.state[p]["exp_avg"].data_ptr()
bad = {"state": {0: {**saved["state"][0], "exp_avg": torch.zeros(1)}}, "param_groups": saved["param_groups"]}
try:
    optimizer.load_state_dict(bad)
except CheckpointMismatch:
    pass
else:
    raise SystemExit("a wrong shape was taken")
entry = {"step": 7, "exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3)}
good = {"state": {0: entry}, "param_groups": saved["param_groups"]}
optimizer.load_state_dict(good)
if optimizer.state[p]["step"] != 7 or optimizer.state[p]["exp_avg"].data_ptr() != pointer:
    raise SystemExit("not loaded in place")
"""


def test_nothing_of_this_rests_on_asserts():
    done = subprocess.run(
        [sys.executable, "-O", "-c", CHECKS_UNDER_O], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_parameter_whose_local_tensor_is_elsewhere_is_refused(monkeypatch):
    param = torch.nn.Parameter(torch.zeros(3))
    monkeypatch.setattr("orlop.compat.local_tensor", lambda tensor: torch.empty(tensor.shape, device="meta"))
    with pytest.raises(OptimizerRefused, match="its local tensor on meta"):
        orlop.SwapAdamW([param])


class FailsInTheMiddle(torch.optim.AdamW):
    """Fails for one parameter, on demand."""

    fail = False

    def step(self, closure=None):
        if self.fail and any(p.shape == (3, 5) for group in self.param_groups for p in group["params"]):
            raise RuntimeError("the middle of a step")
        return super().step(closure)


def test_a_torn_step_refuses_to_go_on_until_a_load():
    model = make_model()
    optimizer = orlop.swap(FailsInTheMiddle)(model.parameters(), window_bytes=64)
    optimizer.links[torch.device("cpu")] = ThreadLink()
    give_gradients(model)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.fail = True
    with pytest.raises(RuntimeError, match="the middle of a step"):
        optimizer.step()
    optimizer.fail = False
    for refused in (optimizer.step, optimizer.state_dict):
        with pytest.raises(StateNotReady, match="window"):
            refused()
    optimizer.load_state_dict(saved)
    optimizer.step()


def test_the_public_class_is_the_one_that_the_factory_knows():
    assert swap_module._made[torch.optim.AdamW] is orlop.SwapAdamW


# -- what a review found -------------------------------------------------------------------------------------------


def stepped_flags(optimizer):
    return [optimizer.stepped(param) for group in optimizer.param_groups for param in group["params"]]


def test_parameters_step_again_after_a_reset():
    model = make_model()
    optimizer = orlop.SwapAdamW(model.parameters())
    give_gradients(model)
    optimizer.step()
    optimizer.load_state_dict({"state": {}, "param_groups": optimizer.state_dict()["param_groups"]})
    assert not any(stepped_flags(optimizer))
    give_gradients(model)
    optimizer.step()
    assert all(stepped_flags(optimizer))


def test_copies_know_who_stepped_whatever_was_frozen_and_when():
    params = [torch.nn.Parameter(torch.randn(4)) for _ in range(3)]
    params[0].requires_grad_(False)
    optimizer = orlop.SwapAdamW(params)
    params[1].grad = torch.ones(4)
    optimizer.step()
    params[0].requires_grad_(True)
    params[0].grad = torch.ones(4)
    optimizer.step()
    params[1].requires_grad_(False)
    twin = copy.deepcopy(optimizer)
    assert stepped_flags(twin) == stepped_flags(optimizer) == [True, True, False]
    frozen = twin.param_groups[0]["params"][1]
    assert all(twin.holds(value) for value in twin.state[frozen].values())


def test_groups_on_two_devices_are_each_stepped_once(monkeypatch):
    (model, swapped), (other, stock) = pair(lr=0.1)
    for optimizer, module in ((swapped, model), (stock, other)):
        moved = list(module[2].parameters())
        group = optimizer.param_groups[0]
        group["params"] = [p for p in group["params"] if all(p is not q for q in moved)]
        optimizer.param_groups.append({**group, "params": moved})
    devices = (torch.device("cpu", 0), torch.device("cpu", 1))

    def split(active):
        second = {id(p) for p in model[2].parameters()}
        return {
            devices[0]: [r for r in active if id(r.param) not in second],
            devices[1]: [r for r in active if id(r.param) in second],
        }

    monkeypatch.setattr("orlop.optim.stepper.split_by_device", split)
    for device in devices:
        swapped.links[device] = ThreadLink()
    for number in range(3):
        for each, optimizer in ((model, swapped), (other, stock)):
            give_gradients(each, number)
            optimizer.step()
    assert_equal_models(model, other)


class NormOnRequest(torch.optim.SGD):
    """Elementwise or not, by an option that it keeps on itself."""

    def __init__(self, params, norm=False, lr=0.1):
        super().__init__(params, lr=lr)
        self.norm = norm

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    moment = self.state[param].setdefault("moment", torch.zeros_like(param))
                    moment.add_(param.grad)
                    scale = float(moment.norm()) if self.norm else 1.0
                    param.sub_(moment / scale, alpha=float(group["lr"]))


def test_options_on_the_object_and_a_rate_of_zero_do_not_prove_too_much():
    params = [torch.nn.Parameter(torch.randn(40, 3))]
    assert orlop.swap(NormOnRequest)(params, norm=False).method == "sliced"
    assert orlop.swap(NormOnRequest)(params, norm=True, lr=0.0).method == "windowed"
    assert orlop.swap(NormOnRequest)(params, norm=True, lr=0.1).method == "windowed"


def test_a_load_after_a_torn_step_is_not_overtaken_by_what_was_on_its_way():
    model = make_model()
    link = ThreadLink(before_copy=lambda lane, window: time.sleep(0.02 if lane == "down" else 0))
    optimizer = orlop.swap(FailsInTheMiddle)(model.parameters(), window_bytes=64)
    optimizer.links[torch.device("cpu")] = link
    saved = copy.deepcopy(optimizer.state_dict())
    give_gradients(model)
    optimizer.fail = True
    with pytest.raises(RuntimeError, match="middle"):
        optimizer.step()
    optimizer.load_state_dict(saved)
    time.sleep(0.1)
    optimizer.synchronize()
    assert all(not value.any() for entry in optimizer.state.values() for value in entry.values())


class StopsInTheMiddle(FailsInTheMiddle):
    @torch.no_grad()
    def step(self, closure=None):
        if self.fail and any(p.shape == (3, 5) for group in self.param_groups for p in group["params"]):
            raise KeyboardInterrupt
        return super(FailsInTheMiddle, self).step(closure)


def test_an_interrupt_in_the_middle_of_a_step_is_a_torn_step():
    model = make_model()
    optimizer = orlop.swap(StopsInTheMiddle)(model.parameters(), window_bytes=64)
    optimizer.links[torch.device("cpu")] = ThreadLink()
    give_gradients(model)
    optimizer.fail = True
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    with pytest.raises(StateNotReady):
        optimizer.state_dict()


@pytest.mark.parametrize("link", [None, ThreadLink], ids=["in_place", "thread_link"])
def test_a_state_that_is_assigned_anew_is_a_reset(link):
    (model, swapped), (other, stock) = pair(lr=0.1)
    if link:
        swapped.links[torch.device("cpu")] = link()
    for number in range(5):
        for each, optimizer in ((model, swapped), (other, stock)):
            if number == 2:
                optimizer.state = collections.defaultdict(dict)
            give_gradients(each, number)
            optimizer.step()
    assert_equal_models(model, other)
    saved = swapped.state_dict()["state"]
    assert all(entry["step"] == 3 for entry in saved.values())
    assert all(swapped.holds(value) for entry in saved.values() for value in entry.values())


def test_a_step_in_backward_does_not_outlive_a_load_or_its_optimizer():
    model, other = make_model(), make_model()
    swapped = orlop.SwapAdamW(model.parameters(), lr=0.1, step_in_backward=2)
    stock = torch.optim.AdamW(other.parameters(), lr=0.1)
    swapped.links[torch.device("cpu")] = ThreadLink()
    state = copy.deepcopy(swapped.state_dict())
    for entry in state["state"].values():
        entry["exp_avg"].fill_(0.5)
    for each, optimizer in ((model, swapped), (other, stock)):
        each(torch.ones(2, 6)).sum().backward()
        optimizer.zero_grad()
        optimizer.load_state_dict(copy.deepcopy(state))
        for _ in range(2):
            each(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_equal_models(model, other)
    gone = weakref.ref(swapped)
    del swapped, optimizer
    gc.collect()
    assert gone() is None
    model(torch.ones(2, 6)).sum().backward()  # nobody is left who would step


def test_what_is_no_state_dict_is_said_and_nothing_is_admitted_for_a_refused_load():
    model = make_model()
    model[0].weight.requires_grad_(False)
    optimizer = orlop.SwapAdamW(model.parameters())
    for wrong in ({}, {"state": {}}):
        with pytest.raises(CheckpointMismatch, match="no optimizer state dict"):
            optimizer.load_state_dict(wrong)
    source = orlop.SwapAdamW(make_model().parameters())
    full = copy.deepcopy(source.state_dict())
    full["state"][1]["exp_avg"] = torch.empty(5, device="meta")
    with pytest.raises(CheckpointMismatch, match="without values"):
        optimizer.load_state_dict(full)
    assert model[0].weight not in optimizer.state
