"""`load_state_dict`: the same objects, filled; everything refused before anything is touched."""

from __future__ import annotations

import copy
import gc
import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import orlop
from orlop.errors import CheckpointMismatch
from orlop.optim.adopt import holds_exactly, widens


def make_params():
    torch.manual_seed(1)
    return [
        torch.nn.Parameter(torch.randn(7, 5)),
        torch.nn.Parameter(torch.randn(5)),
        torch.nn.Parameter(torch.randn(())),
    ]


def make(optimizer_class=torch.optim.AdamW, *, steps=0, lr=1e-3, params=None, named=False, **kwargs):
    """An optimizer over two groups after some steps."""
    params = params or make_params()
    entries = [(f"w{i}", p) for i, p in enumerate(params)] if named else params
    groups = [{"params": entries[:1]}, {"params": entries[1:], "lr": lr * 2}]
    optimizer = orlop.swap(optimizer_class)(groups, lr=lr, **kwargs)
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()
    return params, optimizer


def snapshot(optimizer):
    """Everything of an optimizer by value, and the identity of everything that must stay the same object."""
    tensors = [v for entry in optimizer.state.values() for v in entry.values()]
    identity = (
        [id(t) for t in tensors],
        [t.data_ptr() for t in tensors],
        id(optimizer.param_groups),
        [id(g) for g in optimizer.param_groups],
    )
    return copy.deepcopy(optimizer.state_dict()), identity


def assert_same_state(one, other):
    assert set(one["state"]) == set(other["state"])
    for key, entry in one["state"].items():
        assert set(entry) == set(other["state"][key])
        for name, value in entry.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other["state"][key][name])), (
                key,
                name,
            )
    assert [dict(g.items()) for g in one["param_groups"]] == other["param_groups"]


def test_a_load_fills_the_same_objects():
    """A25: moments exact, step 7, lr 5e-4; tensors, storage, groups and dicts stay."""
    _, source = make(steps=7, lr=5e-4)
    params, target = make(lr=0.1)
    saved = copy.deepcopy(source.state_dict())
    _, identity = snapshot(target)
    target.load_state_dict(source.state_dict())
    values, after = snapshot(target)
    assert after == identity
    assert_same_state(values, saved)
    assert target.param_groups[0]["lr"] == 5e-4
    assert all(entry["step"] == 7 for entry in target.state.values())
    assert all(target.holds(v) for entry in target.state.values() for v in entry.values())
    assert all(target.stepped(p) for p in params)


def test_the_storage_that_is_stepped_is_the_storage_that_is_saved():
    _, source = make(steps=3)
    params, target = make()
    scheduler = torch.optim.lr_scheduler.StepLR(target, 1, gamma=0.5)
    target.load_state_dict(source.state_dict())
    pointers = {key: value.data_ptr() for key, value in target.state[params[0]].items()}
    before = target.state[params[0]]["exp_avg"].clone()
    params[0].grad = torch.ones_like(params[0])
    target.step()
    scheduler.step()
    saved = target.state_dict()["state"][0]
    assert {key: value.data_ptr() for key, value in saved.items()} == pointers
    assert not torch.equal(saved["exp_avg"], before)
    assert saved["step"] == 4
    assert target.param_groups[0]["lr"] == scheduler.get_last_lr()[0]


def test_the_given_dict_is_neither_changed_nor_aliased():
    _, source = make(steps=2)
    params, target = make()
    given_dict = copy.deepcopy(source.state_dict())
    given_dict["param_groups"][0]["custom"] = [1, 2]
    kept = copy.deepcopy(given_dict)
    target.load_state_dict(given_dict)
    params[0].grad = torch.ones_like(params[0])
    target.step()
    target.param_groups[0]["custom"].append(3)
    target.param_groups[0]["lr"] = 9.0
    assert_same_state(given_dict, kept)


@pytest.mark.parametrize(
    "name, kwargs, fresh",
    [
        ("AdamW", {"amsgrad": True}, {"step": 0.0, "exp_avg": 0.0, "exp_avg_sq": 0.0, "max_exp_avg_sq": 0.0}),
        ("NAdam", {}, {"step": 0.0, "mu_product": 1.0, "exp_avg": 0.0, "exp_avg_sq": 0.0}),
        ("Adagrad", {"initial_accumulator_value": 0.5}, {"step": 0.0, "sum": 0.5}),
    ],
)
def test_an_empty_state_resets_in_place_to_the_classes_own_initial_values(name, kwargs, fresh):
    params, optimizer = make(getattr(torch.optim, name), steps=3, **kwargs)
    pointers = [v.data_ptr() for entry in optimizer.state.values() for v in entry.values()]
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": {}, "param_groups": groups})
    assert [v.data_ptr() for entry in optimizer.state.values() for v in entry.values()] == pointers
    for param in params:
        entry = optimizer.state[param]
        assert set(entry) == set(fresh)
        assert all(bool((entry[key] == value).all()) for key, value in fresh.items())
        assert not optimizer.stepped(param)


@pytest.mark.parametrize(
    "name, kwargs", [("SGD", {"momentum": 0.9, "dampening": 0.5}), ("Rprop", {}), ("ASGD", {})]
)
def test_a_reset_of_a_class_that_makes_its_own_state_steps_like_a_new_one(name, kwargs):
    """A27: a zero-filled buffer is not the same as never used (dampening)."""
    stock_class = getattr(torch.optim, name)
    params, optimizer = make(stock_class, steps=3, **kwargs)
    optimizer.load_state_dict({"state": {}, "param_groups": optimizer.state_dict()["param_groups"]})
    others = [torch.nn.Parameter(p.detach().clone()) for p in params]
    stock = stock_class([{"params": others[:1]}, {"params": others[1:], "lr": 2e-3}], lr=1e-3, **kwargs)
    for mine, theirs in zip(params, others):
        mine.grad = theirs.grad = torch.randn(mine.shape)
    optimizer.step()
    stock.step()
    for mine, theirs in zip(params, others):
        assert torch.equal(mine, theirs)
        assert all(torch.equal(optimizer.state[mine][k], v) for k, v in stock.state[theirs].items())


def broken(change):
    _, source = make(steps=2)
    state_dict = copy.deepcopy(source.state_dict())
    change(state_dict)
    return state_dict


REFUSED = {
    "extra key": (lambda d: d["state"][0].update(other=torch.zeros(7, 5)), ["0 of group 0", "other"]),
    "missing key": (lambda d: d["state"][1].pop("exp_avg_sq"), ["0 of group 1", "exp_avg_sq"]),
    "wrong shape": (
        lambda d: d["state"][0].update(exp_avg=torch.zeros(5, 7)),
        ["0 of group 0", "exp_avg", r"\(7, 5\)", r"\(5, 7\)"],
    ),
    "a shape that would broadcast": (
        lambda d: d["state"][0].update(exp_avg=torch.zeros(5)),
        ["exp_avg", r"\(5,\)"],
    ),
    "0-dim into 1-element": (lambda d: d["state"][0].update(exp_avg=torch.zeros(())), ["exp_avg"]),
    "a lossy dtype": (
        lambda d: d["state"][0].update(exp_avg=torch.zeros(7, 5, dtype=torch.float64)),
        ["exp_avg", "float64"],
    ),
    "an integer moment": (
        lambda d: d["state"][0].update(exp_avg=torch.zeros(7, 5, dtype=torch.int32)),
        ["exp_avg", "int32"],
    ),
    "a step that is no float32": (lambda d: d["state"][0].update(step=16777217), ["step", "16777217"]),
    "a number for a moment": (lambda d: d["state"][0].update(exp_avg=1.0), ["exp_avg"]),
    "wrong group size": (lambda d: d["param_groups"][1]["params"].pop(), ["param group 1"]),
    "a group too few": (lambda d: d["param_groups"].pop(), ["number of param groups"]),
    "unknown ids": (lambda d: d["state"].update({17: d["state"].pop(0)}), ["17"]),
    "no id at all matches": (
        lambda d: d.update(state={f"layer.{k}": v for k, v in d["state"].items()}),
        [r"layer\.0", "3 of 3 ids unknown"],
    ),
}


@pytest.mark.parametrize("change, mentioned", REFUSED.values(), ids=REFUSED)
def test_anything_off_is_refused_with_nothing_changed(change, mentioned):
    params, target = make(steps=1, lr=0.5)
    weights = [p.detach().clone() for p in params]
    before, identity = snapshot(target)
    with pytest.raises(CheckpointMismatch) as caught:
        target.load_state_dict(broken(change))
    assert isinstance(caught.value, ValueError)
    for pattern in mentioned:
        assert __import__("re").search(pattern, str(caught.value)), str(caught.value)
    after, identity_after = snapshot(target)
    assert identity_after == identity
    assert_same_state(after, before)
    assert all(torch.equal(p, w) for p, w in zip(params, weights))
    target.step()  # and it is still fit to go on


def test_a_placeholder_for_no_state_is_no_key():
    """amsgrad=False, written by some as `max_exp_avg_sq` = None."""
    _, target = make()
    target.load_state_dict(broken(lambda d: [e.update(max_exp_avg_sq=None) for e in d["state"].values()]))
    assert all(set(e) == {"step", "exp_avg", "exp_avg_sq"} for e in target.state.values())


def test_amsgrad_state_is_loaded_and_demanded():
    _, source = make(steps=2, amsgrad=True)
    params, target = make(amsgrad=True)
    target.load_state_dict(source.state_dict())
    assert_same_state(target.state_dict(), source.state_dict())
    with pytest.raises(CheckpointMismatch, match="max_exp_avg_sq"):
        target.load_state_dict(broken(lambda d: None))
    assert params


def test_numbers_and_narrower_floats_are_widened():
    """Old files hold `step` as a number; half-precision moments fit into single ones."""
    _, target = make()
    state_dict = broken(
        lambda d: [e.update(step=7, exp_avg=e["exp_avg"].bfloat16()) for e in d["state"].values()]
    )
    target.load_state_dict(state_dict)
    for key, entry in target.state_dict()["state"].items():
        assert entry["step"].dtype == torch.float32
        assert entry["step"] == 7
        assert entry["exp_avg"].dtype == torch.float32
        assert torch.equal(entry["exp_avg"], state_dict["state"][key]["exp_avg"].float())


def test_moments_keep_their_own_dtype_over_low_precision_parameters():
    """A16: torch casts them to the parameter's dtype at each load; here that is refused, not done."""
    params = [torch.nn.Parameter(p.detach().bfloat16()) for p in make_params()]
    _, target = make(params=params)
    state_dict = copy.deepcopy(target.state_dict())
    state_dict["state"][0]["exp_avg"] = torch.full((7, 5), 1 / 3)
    with pytest.raises(CheckpointMismatch, match="bfloat16"):
        target.load_state_dict(state_dict)
    assert target.state[params[0]]["exp_avg"].dtype == torch.bfloat16


def test_step_counters_are_exact_at_any_default_dtype():
    """A18: 257 and 10000, never bfloat16's neighbours."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        params = [torch.nn.Parameter(torch.zeros(3))]
        optimizer = orlop.SwapAdamW(params)
        for _ in range(258):
            params[0].grad = torch.ones(3)
            optimizer.step()
        assert optimizer.state[params[0]]["step"] == 258
        saved = copy.deepcopy(optimizer.state_dict())
        saved["state"][0]["step"].fill_(10000)
        optimizer.load_state_dict(saved)
        assert optimizer.state[params[0]]["step"] == 10000
        assert optimizer.state[params[0]]["step"].dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_wholly_missing_parameter_was_absent_and_is_named_once(caplog):
    params, target = make(steps=2)
    state_dict = broken(lambda d: d["state"].pop(1))
    with caplog.at_level(logging.WARNING, "orlop"):
        target.load_state_dict(state_dict)
    assert [r.getMessage() for r in caplog.records] == [
        "1 parameter has no state in the loaded state dict, so a fresh optimizer's: 0 of group 1"
    ]
    assert target.state[params[1]]["step"] == 0
    assert [target.stepped(p) for p in params] == [True, False, True]


def test_torchs_own_setter_after_a_save_with_an_untouched_parameter():
    """A02, through `set_optimizer_state_dict(strict=False)` from torch 2.10 on."""

    def build():
        torch.manual_seed(0)
        model = torch.nn.ModuleDict({"used": torch.nn.Linear(3, 3), "unused": torch.nn.Linear(3, 3)})
        return model, orlop.SwapAdamW(model.parameters(), lr=0.1)

    model, optimizer = build()
    for param in model["used"].parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    saved = get_optimizer_state_dict(model, optimizer)
    for name in ("unused.weight", "unused.bias"):
        del saved["state"][name]
    fresh_model, fresh = build()
    options = torch.distributed.checkpoint.state_dict.StateDictOptions(strict=False)
    if tuple(int(x) for x in torch.__version__.split(".")[:2]) < (2, 10):
        pytest.skip("torch's setter raises a bare KeyError before 2.10")
    set_optimizer_state_dict(fresh_model, fresh, saved, options=options)
    assert fresh.state[fresh_model["used"].weight]["step"] == 1
    assert not fresh.stepped(fresh_model["unused"].weight)
    assert torch.equal(
        fresh.state[fresh_model["used"].weight]["exp_avg"], optimizer.state[model["used"].weight]["exp_avg"]
    )


def test_torchs_own_round_trip_through_the_live_tensors():
    """The setter hands over the caller's own tensors, here the live ones."""
    model = torch.nn.Linear(3, 2)
    optimizer = orlop.SwapAdamW(model.parameters(), lr=0.1)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    before, identity = snapshot(optimizer)
    set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, optimizer))
    after, identity_after = snapshot(optimizer)
    assert identity == identity_after
    assert_same_state(after, before)


def test_hooks_are_replayed_as_torch_does():
    _, source = make(steps=2)
    _, target = make()
    seen = []

    def halve(optimizer, state_dict):
        seen.append(("pre", optimizer is target))
        groups = copy.deepcopy(state_dict["param_groups"])
        groups[0]["lr"] = 0.25
        return {**state_dict, "param_groups": groups}

    target.register_load_state_dict_pre_hook(halve)
    target.register_load_state_dict_post_hook(lambda optimizer: seen.append(("post", optimizer is target)))
    given_dict = source.state_dict()
    target.load_state_dict(given_dict)
    assert seen == [("pre", True), ("post", True)]
    assert target.param_groups[0]["lr"] == 0.25
    assert given_dict["param_groups"][0]["lr"] == 1e-3


def test_groups_take_over_values_and_keep_what_is_the_live_runs():
    """A09, A15, A22: initial_lr and counters come back; foreach, fused and capturable stay the live run's."""
    _, source = make(steps=1, fused=True)
    source.param_groups[0].update(initial_lr=0.7, counter=58)
    del source.param_groups[1]["eps"]
    _, target = make(foreach=True, eps=1e-5)
    lr = target.param_groups[1]["lr"] = torch.tensor(0.3)
    target.load_state_dict(source.state_dict())
    assert target.param_groups[0]["initial_lr"] == 0.7
    assert target.param_groups[0]["counter"] == 58
    assert target.param_groups[0]["eps"] == 1e-8
    assert target.param_groups[1]["eps"] == 1e-5
    assert [g["foreach"] for g in target.param_groups] == [True, True]
    assert [g["fused"] for g in target.param_groups] == [None, None]
    assert target.param_groups[1]["lr"] is lr
    assert lr == torch.tensor(2e-3)


def test_named_parameters_are_matched_by_name_whatever_their_order():
    """A11: two 4x4 weights in groups of opposite order."""

    def build(order):
        weights = {n: torch.nn.Parameter(torch.full((4, 4), float(i))) for i, n in enumerate(("a", "b"))}
        groups = [{"params": [(n, weights[n])], "lr": 1e-3 if n == "a" else 1e-4} for n in order]
        return weights, orlop.SwapAdamW(groups)

    weights, source = build("ab")
    weights["a"].grad, weights["b"].grad = torch.ones(4, 4), torch.full((4, 4), 2.0)
    source.step()
    others, target = build("ba")
    target.load_state_dict(source.state_dict())
    for name in "ab":
        assert torch.equal(target.state[others[name]]["exp_avg"], source.state[weights[name]]["exp_avg"])
    assert [(g["param_names"], g["lr"]) for g in target.param_groups] == [(["b"], 1e-4), (["a"], 1e-3)]
    _, stranger = make(named=True)
    with pytest.raises(CheckpointMismatch, match="param group 0"):
        stranger.load_state_dict(source.state_dict())


def test_state_of_a_parameter_that_was_frozen_since_comes_back():
    _, source = make(steps=2)
    params = make_params()
    params[1].requires_grad_(False)
    _, target = make(params=params)
    target.load_state_dict(source.state_dict())
    assert target.state[params[1]]["step"] == 2
    assert target.holds(target.state[params[1]]["exp_avg"])


def test_betas_that_are_loaded_are_what_the_next_step_uses():
    """A27."""
    _, source = make(steps=2, betas=(0.8, 0.99))
    params, target = make()
    target.load_state_dict(source.state_dict())
    others, control = make(steps=2, betas=(0.8, 0.99))
    for mine, theirs in zip(params, others):
        mine.data.copy_(theirs)
        mine.grad = theirs.grad = torch.full(mine.shape, 0.3)
    target.step()
    control.step()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(params, others))


class NoLargeAllocations(TorchDispatchMode):
    """Fails on any new tensor of the size of a moment: outside the arena, a load has no use for one."""

    def __init__(self, limit_bytes):
        super().__init__()
        self.limit_bytes = limit_bytes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {
            t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)
        }
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in given:
                assert tensor.nbytes < self.limit_bytes, func
        return result


def test_a_load_allocates_nothing_of_the_size_of_the_state():
    """B08, B20: bytes go from the given tensors into the arena."""
    params = [torch.nn.Parameter(torch.zeros(50_000)) for _ in range(4)]
    _, source = make(params=params, steps=1)
    saved = copy.deepcopy(source.state_dict())
    _, target = make(params=params)
    arena = target.arena_bytes
    with NoLargeAllocations(50_000):
        target.load_state_dict(saved)
    assert target.arena_bytes == arena


def test_pages_are_locked_once_whatever_is_loaded(monkeypatch):
    """B07."""
    locked = []

    def register(address, nbytes):
        locked.append(nbytes)
        return lambda: locked.remove(nbytes)

    monkeypatch.setattr("orlop.compat.register_pinned", register)
    monkeypatch.setattr("orlop.optim.roster.wants_pinned", lambda groups: True)
    _, source = make(steps=1)
    _, target = make()
    assert locked == [source.arena_bytes, target.arena_bytes]
    for _ in range(2):
        target.load_state_dict(source.state_dict())
    assert len(locked) == 2
    del target
    gc.collect()
    assert len(locked) == 1


DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


@given(st.sampled_from(DTYPES), st.sampled_from(DTYPES), st.integers(-(2**40), 2**40))
def test_widening_never_loses_a_value(source, target, number):
    """Whatever `widens` accepts gives back the same value."""
    value = torch.tensor(number, dtype=torch.int64).to(source)
    if widens(source, target):
        assert torch.equal(value.to(target).to(source), value)
    if holds_exactly(target, number):
        assert torch.tensor(number, dtype=target).item() == number
