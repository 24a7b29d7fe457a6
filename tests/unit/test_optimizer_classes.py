"""Optimizer classes whose state can't be foreseen: saved, loaded into a fresh run, and going on bit for bit."""

import copy
import re

import pytest
import torch
from tests.rewriting import drop, keys, rewrite
from torch import nn
from torch.optim import SGD, AdamW, Optimizer, RMSprop

import orlop
from orlop import swap
from orlop.checkpoints import CheckpointStore
from orlop.engine import TrainEngine
from orlop.errors import CheckpointIncomplete, CheckpointMismatch, CheckpointUnsafe, OptimizerRefused
from orlop.resume import LoadPolicy
from orlop.store.manifest import read_manifest, write_manifest


class Rule(Optimizer):
    """A class of one's own; what it does to one parameter is `update`."""

    def __init__(self, params, lr=0.01, **options):
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(group, param, self.state[param])


class ReadsFirst(Rule):
    """Reads a value before it makes its state, which meta tensors don't have."""

    def update(self, group, param, state):
        norm = param.grad.norm().item()
        if not state:
            state["m"], state["step"] = torch.zeros_like(param), 0
        state["step"] += 1
        state["m"].mul_(0.9).add_(param.grad / (norm + 1))
        param.sub_(group["lr"] * state["m"] / state["step"])


class MakesLater(Rule):
    """A second slot appears at the second step."""

    def update(self, group, param, state):
        if not state:
            state["step"], state["m"] = 0, torch.zeros_like(param)
        else:
            state.setdefault("prev", torch.zeros_like(param)).copy_(state["m"])
        state["step"] += 1
        state["m"].mul_(0.9).add_(param.grad)
        param.sub_(group["lr"] * (state["m"] + state.get("prev", 0)))


class EverySecond(Rule):
    """A preconditioner, from the second step on."""

    def update(self, group, param, state):
        if not state:
            state["step"] = 0
        if state["step"] % 2 == 1:
            state["pre"] = param.grad.abs() + 1
        state["step"] += 1
        param.sub_(group["lr"] * param.grad / state.get("pre", 1.0))


class MadeAtOnce(Rule):
    """Its state is there from construction on, and has to be."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, lr)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param].update(m=torch.full_like(param, 0.25), n=torch.zeros_like(param))

    def update(self, group, param, state):
        state["m"].lerp_(param.grad, 0.1)
        state["n"].add_(1)
        param.sub_(group["lr"] * state["m"] / state["n"])


class Lists(Rule):
    """Lists of matrices (Shampoo), and something that is None at first."""

    def update(self, group, param, state):
        if not state:
            state.update(step=0, factors=[torch.zeros(d, d) for d in param.shape], roots=None, old=None)
        if state["old"] is not None:
            param.sub_(0.1 * group["lr"] * state["old"])
        grad = param.grad
        for axis, factor in enumerate(state["factors"]):
            others = [a for a in range(grad.ndim) if a != axis]
            factor.lerp_(torch.tensordot(grad, grad, dims=[others, others]), 0.1)
        state["roots"] = [factor + torch.eye(len(factor)) for factor in state["factors"]]
        state["step"] += 1
        if state["step"] > 1:
            state["old"] = grad.clone()
        param.sub_(group["lr"] * grad / sum(root.trace() for root in state["roots"]))


class Nested(Rule):
    """A dict, a tuple, a string and integers."""

    def update(self, group, param, state):
        if not state:
            state.update(buf={"m": torch.zeros_like(param), "n": 0}, mode="warm", pair=(1, 2.5))
            state["counts"] = torch.zeros(3, dtype=torch.int64)
        state["buf"]["m"].add_(param.grad)
        state["buf"]["n"] += 1
        state["counts"] += 1
        param.sub_(group["lr"] * state["buf"]["m"] / state["buf"]["n"])


class Net(nn.Module):
    def __init__(self, embedded=False):
        super().__init__()
        self.table = nn.Embedding(6, 3, sparse=True) if embedded else None
        self.a = nn.Linear(3, 4)
        self.b = nn.Linear(4, 2)
        self.unused = nn.Linear(2, 2)
        self.late = nn.Linear(3, 2)

    def forward(self, step):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(5, 3, generator=generator)
        if self.table is not None:
            x = self.table(torch.randint(6, (5,), generator=generator))
        y = self.b(torch.tanh(self.a(x)))
        return (y + self.late(x) if step >= 3 else y).square().mean()


def make(optimizer_class, *, seed=0, embedded=False, **options):
    torch.manual_seed(seed)
    model = Net(embedded)
    params = model.table.parameters() if embedded else model.parameters()
    return TrainEngine(model, optimizer_class(params, **{"lr": 1e-2, **options}))


def train(engine, *steps):
    optimizer = engine.optimizers["optimizer"]
    for step in steps:

        def closure(step=step):
            engine.model.zero_grad()
            loss = engine.model(step)
            loss.backward()
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    return engine


def snapshot(engine):
    """Model, state and group values; host-resident parameters that never stepped have no state."""
    (optimizer,) = engine.optimizers.values()
    stepped = getattr(optimizer, "stepped", lambda param: True)
    if hasattr(optimizer, "synchronize"):
        optimizer.synchronize()
    names = {param: name for name, param in engine.model.named_parameters()}
    state = {
        names[param]: dict(entry) for param, entry in optimizer.state.items() if entry and stepped(param)
    }
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return copy.deepcopy([dict(engine.model.state_dict()), state, groups])


def assert_same(one, other):
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for mine, its in zip(one, other):
            assert_same(mine, its)
    else:
        assert one == other


def goes_on(path, build, *, at, layout="nested"):
    """A run that stops at step `at` and resumes, in a new process and in its own, ends as one that never stopped."""
    whole = train(build(), *range(5))
    first = train(build(), *range(at))
    before = snapshot(first)
    first.save_dcp(path, optimizer_layout=layout)
    assert_same(before, snapshot(first))
    train(first, *range(at, 5))
    for engine in (build(seed=9), first):
        engine.load_dcp(path)
        assert_same(before, snapshot(engine))
        train(engine, *range(at, 5))
        assert_same(snapshot(whole), snapshot(engine))


def refused(engine, path, error=CheckpointMismatch, **options):
    before = snapshot(engine)
    with pytest.raises(error) as caught:
        engine.load_dcp(path, **options)
    assert_same(before, snapshot(engine))
    return str(caught.value)


# -- state that nobody foresees ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "at", "max_iter"), [("nested", 3, 3), ("flattened", 1, 3), ("nested", 1, 1), ("nested", 2, 1)]
)
def test_x03_lbfgs_goes_on_bit_for_bit(tmp_path, layout, at, max_iter):
    def build(seed=0):
        return make(torch.optim.LBFGS, seed=seed, lr=0.1, history_size=3, max_iter=max_iter)

    goes_on(tmp_path / "x", build, at=at, layout=layout)


def test_x03_lbfgs_resumes_from_a_store(tmp_path):
    whole = train(make(torch.optim.LBFGS, lr=0.1), *range(4))
    CheckpointStore(tmp_path).save(train(make(torch.optim.LBFGS, lr=0.1), 0, 1), 2)
    second = make(torch.optim.LBFGS, seed=9, lr=0.1)
    assert CheckpointStore(tmp_path).resume(second).step == 2
    assert_same(snapshot(whole), snapshot(train(second, 2, 3)))


def test_sparse_adam_goes_on_bit_for_bit(tmp_path):
    goes_on(tmp_path / "x", lambda seed=0: make(torch.optim.SparseAdam, seed=seed, embedded=True), at=2)


@pytest.mark.parametrize("kind", [lambda kind: kind, swap], ids=["stock", "swapped"])
@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("rule", [ReadsFirst, MakesLater, EverySecond, MadeAtOnce])
def test_state_that_a_meta_step_does_not_show_goes_on_bit_for_bit(tmp_path, rule, at, kind):
    optimizer_class = kind(rule)
    goes_on(tmp_path / "x", lambda seed=0: make(optimizer_class, seed=seed), at=at)


@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("rule", [Lists, Nested])
def test_lists_and_dicts_of_a_stock_class_go_on_bit_for_bit(tmp_path, rule, at):
    goes_on(tmp_path / "x", lambda seed=0: make(rule, seed=seed), at=at)


@pytest.mark.parametrize("kind", [lambda kind: kind, swap], ids=["stock", "swapped"])
@pytest.mark.parametrize("other", ["stock", "swapped"])
def test_stock_and_host_resident_runs_load_each_others_late_slots(tmp_path, kind, other):
    first = train(make(kind(MakesLater)), 0, 1)
    first.save_dcp(tmp_path / "x")
    second = make(swap(MakesLater) if other == "swapped" else MakesLater, seed=9)
    second.load_dcp(tmp_path / "x")
    first, second = (snapshot(train(engine, 2, 3)) for engine in (first, second))
    assert_same(first[0], second[0])


def test_a_loaded_slot_is_filled_in_place_where_there_is_one(tmp_path):
    first = train(make(torch.optim.LBFGS, lr=0.1), 0, 1)
    first.save_dcp(tmp_path / "x")
    (state,) = first.optimizers["optimizer"].state.values()
    train(first, 2)
    slot = state["d"]
    first.load_dcp(tmp_path / "x")
    assert state["d"] is slot


def test_state_of_lists_has_no_initial_values_to_materialize(tmp_path):
    first = train(make(Lists), 0, 1)
    first.save_dcp(tmp_path / "x", materialize_absent=True)
    second = make(Lists, seed=9)
    second.load_dcp(tmp_path / "x")
    assert_same(snapshot(first), snapshot(second))


def test_state_gets_the_strides_that_its_class_gives_it(tmp_path):
    def build(seed=0):
        torch.manual_seed(seed)
        model = nn.Module()
        model.w = nn.Parameter(torch.randn(6, 8)[:, ::2])
        return TrainEngine(model, AdamW(model.parameters(), lr=0.1, fused=True))

    def steps(engine, *numbers):
        for number in numbers:
            generator = torch.Generator().manual_seed(number)
            engine.model.w.grad = torch.randn(6, 4, generator=generator)
            engine.optimizers["optimizer"].step()
        return engine

    first = steps(build(), 0, 1)
    first.save_dcp(tmp_path / "x")
    second = build(seed=9)
    second.load_dcp(tmp_path / "x")
    assert_same(snapshot(steps(first, 2)), snapshot(steps(second, 2)))


# -- what stays a fault ------------------------------------------------------------------------------------------------


RECORDED = [
    (
        lambda seed: make(torch.optim.LBFGS, seed=seed, lr=0.1),
        "a.weight",
        "a lost slot of no class's foresight",
    ),
    (lambda seed: make(torch.optim.SparseAdam, seed=seed, embedded=True), "table.weight", "sparse"),
    (lambda seed: make(MakesLater, seed=seed), "a.weight", "late"),
    (lambda seed: make(swap(MakesLater), seed=seed), "a.weight", "late, host-resident"),
    (lambda seed: make(Lists, seed=seed), "a.weight", "lists"),
]


@pytest.mark.parametrize(
    ("build", "fqn"), [case[:2] for case in RECORDED], ids=[case[2] for case in RECORDED]
)
def test_any_one_slot_that_was_saved_and_is_gone_is_an_error(tmp_path, build, fqn):
    train(build(0), 0, 1, 2).save_dcp(tmp_path / "x")
    prefix = f"optimizer.state.{fqn}."
    slots = [key for key in sorted(keys(tmp_path / "x")) if key.startswith(prefix)]
    assert len(slots) > 2
    damaged = tmp_path / "damaged"
    for slot in slots:
        rewrite(tmp_path / "x", drop(re.escape(slot)), to=damaged)
        for engine in (build(3), train(build(3), 0, 1, 2)):
            text = refused(engine, damaged)
            assert f"partial: {slot} (only " in text
        found = [finding for finding in orlop.verify(damaged) if finding.kind == "partial"]
        assert [finding.where for finding in found] == [prefix.rstrip(".")]
    rewrite(tmp_path / "x", drop(*map(re.escape, slots)), to=damaged)
    assert f"lost: {prefix.rstrip('.')}" in refused(build(3), damaged, error=CheckpointIncomplete)
    found = [finding for finding in orlop.verify(damaged) if finding.kind == "lost"]
    assert [finding.where for finding in found] == [prefix.rstrip(".")]
    report = build(3).load_dcp(damaged, policy=LoadPolicy(reset_damaged=(fqn,)))
    assert [finding.leaf for finding in report.of("reset")] == [prefix.rstrip(".")]


def test_slots_that_some_parameters_had_not_made_yet_are_no_damage(tmp_path):
    first = train(make(MakesLater), 2, 3)  # `late` has made one step of its two
    first.save_dcp(tmp_path / "x")
    assert not [finding for finding in orlop.verify(tmp_path / "x") if finding.is_fault]
    second = train(make(MakesLater, seed=3), 3, 4)
    second.load_dcp(tmp_path / "x")
    assert_same(snapshot(first), snapshot(second))
    assert_same(snapshot(train(first, 4)), snapshot(train(second, 4)))


def test_checkpoints_without_a_record_of_keys_are_still_read(tmp_path):
    first = train(make(torch.optim.LBFGS, lr=0.1), 0, 1)
    first.save_dcp(tmp_path / "x")
    record = read_manifest(tmp_path / "x")
    write_manifest(tmp_path / "x", record.model_copy(update={"state_keys": {}}))
    second = make(torch.optim.LBFGS, seed=3, lr=0.1)
    second.load_dcp(tmp_path / "x")
    assert_same(snapshot(first), snapshot(second))


def test_a_slot_that_the_class_does_foresee_is_still_missed(tmp_path):
    train(make(MakesLater), 0, 1).save_dcp(tmp_path / "x")
    damaged = tmp_path / "damaged"
    rewrite(tmp_path / "x", drop(r"optimizer\.state\.a\.weight\.m"), to=damaged)
    for engine in (make(MakesLater, seed=3), train(make(MakesLater, seed=3), 0, 1)):
        assert "partial: optimizer.state.a.weight.m (only ['prev', 'step'] are there)" in refused(
            engine, damaged
        )
    # The constructor's state is foreseen, too.
    train(make(MadeAtOnce), 0, 1).save_dcp(tmp_path / "made" / "x")
    rewrite(tmp_path / "made" / "x", drop(r"optimizer\.state\.a\.weight\.m"), to=damaged)
    text = refused(train(make(MadeAtOnce, seed=3), 0), damaged)
    assert "partial: optimizer.state.a.weight.m (only ['n'] are there)" in text


def test_without_a_record_nobody_vouches_for_strange_slots(tmp_path):
    train(make(MakesLater), 0, 1).save_dcp(tmp_path / "x")
    train(make(MakesLater), 0).save_dcp(tmp_path / "young")
    bare, young = tmp_path / "bare", tmp_path / "without"
    rewrite(tmp_path / "x", to=bare, keep_record=False)
    text = refused(make(MakesLater, seed=3), bare)
    assert "unexpected: optimizer.state.a.weight.prev (expected only ['m', 'step'])" in text
    # The live slot vouches for itself.
    second = train(make(MakesLater, seed=3), 0, 1)
    second.load_dcp(bare)
    third = make(MakesLater, seed=4)
    third.load_dcp(tmp_path / "x")
    assert_same(snapshot(second), snapshot(third))
    rewrite(tmp_path / "young", to=young, keep_record=False)
    assert "partial: optimizer.state.a.weight.prev" in refused(second, young)


def test_another_class_does_not_vouch(tmp_path):
    train(make(MakesLater), 0, 1).save_dcp(tmp_path / "x")
    text = refused(make(EverySecond, seed=3), tmp_path / "x", policy=LoadPolicy(allow_other_class=True))
    assert "unexpected: optimizer.state.a.weight.m (expected only ['step'])" in text


# -- hyperparameters that decide which state there is ------------------------------------------------------------------

OPTIONS = [
    (SGD, {"momentum": 0}, {"momentum": 0.9}),
    (RMSprop, {}, {"momentum": 0.5, "centered": True}),
    (AdamW, {}, {"amsgrad": True}),
]


@pytest.mark.parametrize("record", [True, False])
@pytest.mark.parametrize(("optimizer_class", "live", "saved"), OPTIONS)
def test_a10_the_saved_hyperparameters_decide_which_state_is_taken(
    tmp_path, optimizer_class, live, saved, record
):
    first = train(make(optimizer_class, **saved), 0, 1)
    first.save_dcp(tmp_path / "x")
    path = tmp_path / "x"
    rewrite(path, keep_record=record)
    second = make(optimizer_class, seed=9, **live)
    third = train(make(optimizer_class, seed=9, **live), 0)
    for engine in (second, third):
        engine.load_dcp(path)
        assert_same(snapshot(first), snapshot(engine))
    assert_same(snapshot(train(first, 2, 3)), snapshot(train(second, 2, 3)))


@pytest.mark.parametrize(("optimizer_class", "live", "saved"), OPTIONS)
def test_a10_state_that_the_saved_hyperparameters_know_no_more_is_dropped(
    tmp_path, optimizer_class, live, saved
):
    first = train(make(optimizer_class, **live), 0, 1)
    first.save_dcp(tmp_path / "x")
    second = train(make(optimizer_class, seed=9, **saved), 0)
    second.load_dcp(tmp_path / "x")
    assert_same(snapshot(first), snapshot(second))


@pytest.mark.parametrize(("optimizer_class", "live", "saved"), OPTIONS)
def test_kept_hyperparameters_that_want_other_state_are_named(tmp_path, optimizer_class, live, saved):
    train(make(optimizer_class, **saved), 0, 1).save_dcp(tmp_path / "x")
    name, value = next(iter(saved.items()))
    mine = make(optimizer_class).optimizers["optimizer"].defaults[name]
    reason = f"; {name} is {mine} here and {value} in the checkpoint)"
    text = refused(make(optimizer_class, seed=9, **live), tmp_path / "x", load_args=False)
    assert "unexpected: optimizer.state.a.weight." in text
    assert reason in text
    text = refused(make(swap(optimizer_class), seed=9, **live), tmp_path / "x")
    assert "unexpected: optimizer.state.a.weight." in text
    assert reason in text
    if optimizer_class is AdamW:
        train(make(AdamW), 0, 1).save_dcp(tmp_path / "plain")
        text = refused(make(AdamW, amsgrad=True), tmp_path / "plain", load_args=False)
        assert "partial: optimizer.state.a.weight.max_exp_avg_sq" in text
        assert "; amsgrad is True here and False in the checkpoint)" in text


def test_asking_the_class_changes_no_hyperparameter(tmp_path):
    class Counts(MakesLater):
        def update(self, group, param, state):
            group["seen"].append(1)
            super().update(group, param, state)

    train(make(Counts, seen=[]), 0, 1).save_dcp(tmp_path / "x")
    second = make(Counts, seed=9, seen=[])
    second.load_dcp(tmp_path / "x", load_args=False)
    assert second.optimizers["optimizer"].param_groups[0]["seen"] == []


# -- what no load would find -------------------------------------------------------------------------------------------


class NumberedKey(Rule):
    def update(self, group, param, state):
        state[0] = param.grad.clone()


class DottedKey(Rule):
    def update(self, group, param, state):
        state["m.avg"] = param.grad.clone()


class Shared(Rule):
    def update(self, group, param, state):
        self.state["global"]["n"] = self.state["global"].get("n", 0) + 1


class OnItself(Rule):
    n = 0

    def update(self, group, param, state):
        state["m"] = param.grad.clone()

    def state_dict(self):
        return {**super().state_dict(), "n": self.n}


@pytest.mark.parametrize(
    ("optimizer_class", "where", "found"),
    [
        (NumberedKey, "where: optimizer.state.a.weight", "found: 0"),
        (swap(NumberedKey), "where: optimizer.state.a.weight", "found: 0"),
        (DottedKey, "where: optimizer.state.a.weight", "found: 'm.avg'"),
        (swap(DottedKey), "where: optimizer.state.a.weight", "found: 'm.avg'"),
        (Shared, "where: optimizer.state", "found: 'global'"),
        (OnItself, "where: optimizer", "found: 'n' besides"),
        (swap(OnItself), "where: optimizer", "found: 'n' besides"),
    ],
)
def test_state_that_no_load_would_find_is_refused_when_saving(tmp_path, optimizer_class, where, found):
    engine = train(make(optimizer_class), 0, 1)
    before = snapshot_all(engine)
    with pytest.raises(OptimizerRefused) as caught:
        engine.save_dcp(tmp_path / "x")
    assert where in str(caught.value)
    assert found in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    assert_same(before, snapshot_all(engine))


def snapshot_all(engine):
    values = engine.optimizers["optimizer"].state.values()
    return copy.deepcopy([dict(engine.model.state_dict()), [dict(entry) for entry in values]])


def test_a_stale_parameter_is_refused_and_an_empty_entry_is_not(tmp_path):
    engine = train(make(AdamW), 0)
    optimizer = engine.optimizers["optimizer"]
    optimizer.state["looked at"]
    engine.save_dcp(tmp_path / "x")
    optimizer.state[torch.zeros(2, 3)]["step"] = 1
    with pytest.raises(OptimizerRefused, match=r"found: a tensor of shape \(2, 3\)"):
        engine.save_dcp(tmp_path / "y")
    assert not (tmp_path / "y").exists()


def test_what_is_no_data_is_refused_by_its_place(tmp_path):
    engine = train(make(Lists), 0)
    optimizer = engine.optimizers["optimizer"]
    optimizer.state[engine.model.a.weight]["roots"] = [object()]
    with pytest.raises(CheckpointUnsafe, match=r"where: optimizer\.state\.a\.weight\.roots\[0\]"):
        engine.save_dcp(tmp_path / "x")
    assert not (tmp_path / "x").exists()


class MadeOfValues(Rule):
    """What its constructor makes is no constant."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, lr)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param].update(m=param.detach().clone(), n=torch.zeros_like(param))

    update = MadeAtOnce.update


@pytest.mark.parametrize("kind", [lambda kind: kind, swap], ids=["stock", "swapped"])
@pytest.mark.parametrize("rule", [MadeAtOnce, MadeOfValues])
def test_fresh_state_is_what_the_constructor_makes(tmp_path, rule, kind):
    train(make(kind(rule)), 0, 1).save_dcp(tmp_path / "x")
    second = train(make(kind(rule), seed=3), 0, 1)
    second.load_dcp(tmp_path / "x", load_states=False)
    fresh = make(kind(rule), seed=3)
    fresh.model.load_state_dict(second.model.state_dict())
    third = TrainEngine(fresh.model, kind(rule)(fresh.model.parameters(), lr=1e-2))
    assert_same(snapshot(train(third, 2)), snapshot(train(second, 2)))
