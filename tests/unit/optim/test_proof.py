"""Classes of other people: run in the freest way that gives the stock bits, or refused with the reason."""

from __future__ import annotations

import pytest
import torch

import orlop
from orlop.errors import OptimizerRefused
from orlop.testing import ThreadLink


class Sign(torch.optim.Optimizer):
    """Elementwise, with a Python number for its step: how most home-made optimizers look."""

    def __init__(self, params, lr=0.1, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["momentum"] = torch.zeros_like(p)
                state["step"] += 1
                state["momentum"] = state["momentum"] * group["beta"] + p.grad
                p.add_(state["momentum"].sign(), alpha=-group["lr"] / state["step"])


class TrustRatio(Sign):
    """Looks at a whole parameter (LAMB): not to be cut."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("seen", torch.zeros_like(p)).add_(p.grad)
                    p.add_(p.grad, alpha=-group["lr"] * float(p.norm() / (p.grad.norm() + 1)))


class GroupCounter(Sign):
    """Keeps its step counter in the group (schedule-free): it must count once a step."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("sum", torch.zeros_like(p)).add_(p.grad)
                    p.add_(self.state[p]["sum"], alpha=-group["lr"] / group["k"])


class ObjectCounter(Sign):
    """Counts its calls on itself: only one call per step is right."""

    calls = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.calls = self.calls + 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("sum", torch.zeros_like(p)).add_(p.grad)
                    p.add_(self.state[p]["sum"], alpha=-group["lr"] / self.calls)


class GlobalNorm(Sign):
    """Normalises by the norm over all parameters."""

    @torch.no_grad()
    def step(self, closure=None):
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = float(torch.stack([g.norm() for g in grads]).norm()) if grads else 1.0
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("sum", torch.zeros_like(p)).add_(p.grad / norm)
                    p.sub_(self.state[p]["sum"])


class HiddenState(Sign):
    """Keeps its moments in a place of its own."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.hidden = {}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mine = self.hidden.setdefault(id(p), torch.zeros_like(p))
                    mine.add_(p.grad)
                    p.sub_(mine, alpha=group["lr"])


class ListState(Sign):
    """State that is a list of tensors."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("history", []).append(p.grad.clone())
                    p.sub_(self.state[p]["history"][0])


class Quantised(torch.Tensor):
    """A wrapper subclass, as low-bit optimizers keep their moments in."""


class SubclassState(Sign):
    """State that is a tensor subclass."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("moment", torch.zeros_like(p).as_subclass(Quantised)).add_(
                        p.grad
                    )
                    p.sub_(p.grad, alpha=group["lr"])


class LooksAtSiblings(Sign):
    """Fails where its group has not all parameters in it."""

    @torch.no_grad()
    def step(self, closure=None):
        if len({p.shape for group in self.param_groups for p in group["params"]}) < 2:
            raise RuntimeError("where are the others?")
        super().step()


PROVEN = [
    (Sign, "sliced"),
    (TrustRatio, "windowed"),
    (GroupCounter, "sliced"),
    (ObjectCounter, "whole"),
    (GlobalNorm, "whole"),
    (LooksAtSiblings, "whole"),
]


def make_params():
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((40, 7), (300,), (5,))]


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize("optimizer_class, method", PROVEN)
def test_each_class_is_run_as_it_was_proven(optimizer_class, method, threaded):
    params, others = make_params(), make_params()
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.3}]
    theirs = [{"params": others[:2]}, {"params": others[2:], "lr": 0.3}]
    swapped, stock = orlop.swap(optimizer_class)(groups, window_bytes=600), optimizer_class(theirs)
    assert swapped.method == method
    if threaded:
        swapped.links[torch.device("cpu")] = ThreadLink()
    for number in range(4):
        generator = torch.Generator().manual_seed(number)
        for param, other in zip(params, others):
            # In the second step a whole group is idle: a counter in it must count all the same.
            idle = number == 1 and param is params[2]
            param.grad = None if idle else torch.randn(param.shape, generator=generator)
            other.grad = param.grad
        swapped.step()
        stock.step()
    swapped.synchronize()
    for param, other in zip(params, others):
        assert torch.equal(param, other)
        for key, value in stock.state[other].items():
            assert torch.equal(torch.as_tensor(swapped.state[param][key]), torch.as_tensor(value))
            if isinstance(value, torch.Tensor):
                assert swapped.holds(swapped.state[param][key])
    assert [g.get("k") for g in swapped.param_groups] == [g.get("k") for g in stock.param_groups]


def test_number_state_is_saved_and_loaded():
    params, others = make_params(), make_params()
    source, target = orlop.swap(Sign)(params), orlop.swap(Sign)(others)
    for param in params:
        param.grad = torch.ones_like(param)
    source.step()
    target.load_state_dict(source.state_dict())
    assert all(target.state[p]["step"] == 1 for p in others)
    assert all(
        torch.equal(target.state[o]["momentum"], source.state[p]["momentum"]) for o, p in zip(others, params)
    )


@pytest.mark.parametrize(
    "optimizer_class, reason",
    [
        (torch.optim.LBFGS, "closure"),
        (torch.optim.SparseAdam, "dense gradients"),
        (HiddenState, "state is lent"),
        (ListState, "list"),
        (SubclassState, "Quantised"),
    ],
)
def test_what_can_not_be_right_is_refused_with_the_reason(optimizer_class, reason):
    with pytest.raises(OptimizerRefused) as caught:
        orlop.swap(optimizer_class)(make_params())
    assert isinstance(caught.value, TypeError)
    assert reason in str(caught.value)
    assert optimizer_class.__name__ in str(caught.value)


def test_proving_touches_neither_parameters_nor_random_numbers():
    params = make_params()
    before = [p.detach().clone() for p in params]
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    orlop.swap(torch.optim.NAdam)(params, lr=0.0123)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(p, b) for p, b in zip(params, before))
    assert all(p.grad is None for p in params)


def test_construction_says_what_a_class_that_can_not_be_cut_needs(caplog):
    with caplog.at_level("INFO", "orlop"):
        optimizer = orlop.swap(TrustRatio)(make_params(), window_bytes=600)
    assert optimizer.device_bytes > 600
    assert f"a step may take {optimizer.device_bytes:,} bytes" in caplog.text
    assert orlop.SwapAdamW(make_params(), window_bytes=600).device_bytes == 600


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.RMSprop])
def test_options_that_the_dtype_can_not_hold_are_named(optimizer_class):
    params = [torch.nn.Parameter(torch.randn(4, dtype=torch.float16))]
    with pytest.raises(OptimizerRefused) as caught:
        orlop.swap(optimizer_class)(params)
    assert "nan or inf" in str(caught.value)
    assert "torch.float16" in str(caught.value)
    assert orlop.swap(optimizer_class)(params, eps=1e-4).method == "sliced"


class NotesItsRates(torch.optim.SGD):
    """Keeps a list and a nested dict among its hyperparameters, and changes them in place."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        for group in self.param_groups:
            group.setdefault("rates", [])
            group.setdefault("nested", {"count": [0]})

    def step(self, closure=None):
        for group in self.param_groups:
            group["rates"].append(group["lr"])
            group["nested"]["count"][0] += 1
        return super().step(closure)


def test_proving_leaves_lists_among_the_hyperparameters_alone():
    optimizer = orlop.swap(NotesItsRates)(make_params())
    (group,) = optimizer.param_groups
    assert (group["rates"], group["nested"]) == ([], {"count": [0]})
    for param in group["params"]:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert (group["rates"], group["nested"]) == ([0.1], {"count": [1]})
