"""Param groups and schedules over a resume: other orders, other layouts, new and removed layers, other classes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.rewriting import drop, rewrite
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import orlop
from orlop import LoadPolicy, TrainEngine
from orlop.errors import CheckpointIncomplete, CheckpointMismatch

SCHEDULES = {
    "lambda": lambda o: optim.lr_scheduler.LambdaLR(o, [lambda s: 0.9**s] * len(o.param_groups)),
    "restarts": lambda o: optim.lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=7),
    "plateau": lambda o: optim.lr_scheduler.ReduceLROnPlateau(o, min_lr=[0.01] * len(o.param_groups)),
    "chained": lambda o: optim.lr_scheduler.SequentialLR(
        o,
        [optim.lr_scheduler.LinearLR(o), optim.lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=7)],
        milestones=[1],
    ),
}
RATES = {"a": 0.1, "b": 0.2, "c": 0.3, "x": 0.4}


def make(names="abc", *, kind=orlop.SwapAdamW, schedule=None, rates=None, **options):
    """An engine with a linear layer, and a group of its own, for each letter; `|` begins a group."""
    torch.manual_seed(len(names))
    order = names.split("|") if "|" in names else list(names)
    model = nn.ModuleDict({name: nn.Linear(4, 4) for name in sorted("".join(order))})
    groups = [
        {
            "params": [p for name in group for p in model[name].parameters()],
            "lr": (rates or RATES)[group[0]],
        }
        for group in order
    ]
    optimizer = kind(groups, **options)
    return TrainEngine(model, optimizer, scheduler=schedule(optimizer) if schedule else None)


def train(engine, steps=2, start=0):
    (optimizer,) = engine.optimizers.values()
    for step in range(start, start + steps):
        value = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        for name in sorted(engine.model):
            if name != "x":
                value = engine.model[name](value)
        value.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        plateau = isinstance(engine.scheduler, optim.lr_scheduler.ReduceLROnPlateau)
        if engine.scheduler is not None:
            engine.scheduler.step(*([1.0] if plateau else []))
    return engine


def rates(engine):
    """The learning rate of each parameter's group."""
    names = {param: name for name, param in engine.model.named_parameters()}
    (optimizer,) = engine.optimizers.values()
    return {names[param]: float(group["lr"]) for group in optimizer.param_groups for param in group["params"]}


def assert_same(one, other):
    assert rates(one) == rates(other)
    for name, param in one.model.named_parameters():
        assert torch.equal(param, other.model.get_parameter(name)), name


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize("layout", ["nested", "flattened"])
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=list(SCHEDULES))
@pytest.mark.parametrize("kind", [orlop.SwapAdamW, optim.AdamW], ids=["swapped", "stock"])
def test_a11_schedules_follow_groups_in_another_order(tmp_path, kind, schedule, layout):
    first = train(make("abc", kind=kind, schedule=schedule))
    first.save_dcp(tmp_path / "x", optimizer_layout=layout)
    second = make("cab", kind=kind, schedule=schedule, rates=dict.fromkeys(RATES, 0.5))
    second.load_dcp(tmp_path / "x")
    for engine in (first, second):
        train(engine, 4, start=2)
    assert_same(first, second)


@pytest.mark.parametrize("same_rates", [False, True])
def test_a11_without_orlops_record_the_order_is_found_by_the_rates_or_refused(tmp_path, same_rates):
    by_name = {"a": 0.1, "b": 0.1, "c": 0.3} if same_rates else RATES
    first = train(make("acb", kind=optim.AdamW, schedule=SCHEDULES["restarts"], rates=by_name))
    first.save_dcp(tmp_path / "x", optimizer_layout="flattened")
    for file in (tmp_path / "x").glob("*.json"):
        file.unlink()
    second = make("bac", kind=optim.AdamW, schedule=SCHEDULES["restarts"], rates=dict.fromkeys(RATES, 0.5))
    if same_rates:
        before = rates(second)
        with pytest.raises(CheckpointMismatch, match="keeps no order of groups"):
            second.load_dcp(tmp_path / "x")
        assert rates(second) == before
        return
    second.load_dcp(tmp_path / "x")
    for engine in (first, second):
        train(engine, 4, start=2)
    assert_same(first, second)


@pytest.mark.parametrize("layout", ["nested", "flattened"])
@pytest.mark.parametrize("names", ["a|b|cx", "x|a|b|c", "c|x|a|b"])
def test_a06_new_layers_are_named_and_loaded_beside_when_allowed(tmp_path, names, layout):
    first = train(make("a|b|c", schedule=SCHEDULES["lambda"]))
    first.save_dcp(tmp_path / "x", optimizer_layout=layout)
    second = make(names, schedule=SCHEDULES["lambda"], rates=dict.fromkeys(RATES, 0.5))
    before = {name: param.clone() for name, param in second.model.named_parameters()}
    with pytest.raises(CheckpointMismatch) as caught:
        second.load_dcp(tmp_path / "x")
    assert "missing: model.x.weight" in str(caught.value)
    assert "missing: optimizer.param_groups (not in its groups: x.weight, x.bias)" in str(caught.value)
    assert all(torch.equal(before[name], param) for name, param in second.model.named_parameters())
    second.load_dcp(tmp_path / "x", policy=LoadPolicy(allow_missing=True))
    joins = names == "a|b|cx"
    assert rates(second) == {
        **rates(first),
        **dict.fromkeys(["x.weight", "x.bias"], 0.3 * 0.81 if joins else 0.5),
    }
    for engine in (first, second):
        train(engine, 3, start=2)
    for name, param in first.model.named_parameters():
        assert torch.equal(param, second.model.get_parameter(name)), name
    (optimizer,) = second.optimizers.values()
    assert not optimizer.stepped(second.model["x"].weight)


def test_a06_removed_layers_are_named_and_left_when_allowed(tmp_path):
    first = train(make("abx"))
    first.save_dcp(tmp_path / "x")
    second = make("ba")
    with pytest.raises(CheckpointMismatch) as caught:
        second.load_dcp(tmp_path / "x")
    assert "unexpected: optimizer.param_groups (only in its groups: x.weight, x.bias)" in str(caught.value)
    second.load_dcp(tmp_path / "x", policy=LoadPolicy(allow_unexpected=True))
    for engine in (first, second):
        train(engine, 3, start=2)
    for name, param in second.model.named_parameters():
        assert torch.equal(param, first.model.get_parameter(name)), name


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "foreign"])
@pytest.mark.parametrize("names", ["ba", "ca", "cb"])
@pytest.mark.parametrize("layout", ["nested", "flattened"])
def test_schedules_follow_groups_of_which_one_is_gone(tmp_path, layout, names, recorded):
    first = train(make("abc", kind=optim.AdamW, schedule=SCHEDULES["restarts"]))
    first.save_dcp(tmp_path / "x", optimizer_layout=layout)
    if not recorded:
        for own in [*(tmp_path / "x").glob("*.json")]:
            own.unlink()
    second = make(names, kind=optim.AdamW, schedule=SCHEDULES["restarts"], rates=dict.fromkeys(RATES, 0.5))
    second.load_dcp(tmp_path / "x", policy=LoadPolicy(allow_unexpected=True))
    for engine in (first, second):
        engine.scheduler.step()
    assert rates(second) == {name: rate for name, rate in rates(first).items() if name[0] in names}


def test_a_renamed_layer_is_named_on_both_sides(tmp_path):
    train(make("abc")).save_dcp(tmp_path / "x")
    with pytest.raises(CheckpointMismatch) as caught:
        make("abx").load_dcp(tmp_path / "x")
    for line in (
        "missing: model.x.weight",
        "unexpected: model.c.weight",
        "missing: optimizer.param_groups (not in its groups: x.weight, x.bias)",
        "unexpected: optimizer.param_groups (only in its groups: c.weight, c.bias)",
    ):
        assert line in str(caught.value)


@pytest.mark.parametrize(
    "saved, live",
    [
        (optim.SGD, optim.AdamW),
        (optim.SGD, optim.RMSprop),
        (optim.Adam, optim.AdamW),
        (optim.AdamW, optim.Adam),
        (optim.AdamW, optim.NAdam),
        (optim.AdamW, optim.SGD),
    ],
    ids=lambda kind: kind.__name__,
)
@pytest.mark.parametrize("host_resident", [False, True], ids=["stock", "swapped"])
def test_a_plain_checkpoint_of_another_class_is_refused_by_both_names(tmp_path, saved, live, host_resident):
    first = train(make("abc", kind=saved))
    groups = next(iter(first.optimizers.values())).param_groups
    if {saved, live} == {optim.Adam, optim.AdamW} and "decoupled_weight_decay" not in groups[0]:
        pytest.skip("this torch's groups don't tell Adam from AdamW")
    model_state, optimizer_state = get_state_dict(first.model, next(iter(first.optimizers.values())))
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=tmp_path / "x")
    second = make("abc", kind=orlop.swap(live) if host_resident else live, rates=dict.fromkeys(RATES, 0.5))
    (optimizer,) = second.optimizers.values()
    before = [dict(group) for group in optimizer.param_groups]
    with pytest.raises(CheckpointMismatch) as caught:
        second.load_dcp(tmp_path / "x")
    assert f"this run has {live.__name__}" in str(caught.value)
    assert saved.__name__ in str(caught.value)
    assert [{**group, "params": []} for group in optimizer.param_groups] == [
        {**group, "params": []} for group in before
    ]


class Head(nn.Module):
    def __init__(self, *, tied):
        super().__init__()
        self.emb = nn.Linear(4, 4, bias=False)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4, bias=False)
        if tied:
            self.head.weight = self.emb.weight


@pytest.mark.parametrize("layout", ["nested", "flattened"])
def test_weights_that_were_tied_load_untied_in_both_layouts(tmp_path, layout):
    def engine(tied):
        torch.manual_seed(0)
        model = Head(tied=tied)
        groups = [
            {"params": [p for n, p in model.named_parameters() if "body" not in n], "lr": 0.1},
            {"params": list(model.body.parameters()), "lr": 0.2},
        ]
        return TrainEngine(model, orlop.SwapAdamW(groups))

    first = engine(tied=True)
    for param in first.model.parameters():
        param.grad = torch.ones_like(param)
    next(iter(first.optimizers.values())).step()
    first.save_dcp(tmp_path / "x", optimizer_layout=layout)
    second = engine(tied=False)
    second.load_dcp(tmp_path / "x")
    assert torch.equal(second.model.head.weight, first.model.emb.weight)
    (optimizer,) = second.optimizers.values()
    optimizer.synchronize()
    moments = [
        optimizer.state[second.model.get_parameter(f"{name}.weight")]["exp_avg"] for name in ("emb", "head")
    ]
    assert torch.equal(moments[0], moments[1])
    assert bool(moments[0].any())


@pytest.mark.parametrize("saved", [None, "text", [1, 2], torch.ones(3)], ids=str)
@pytest.mark.parametrize("kind", [orlop.SwapAdamW, optim.AdamW], ids=["swapped", "stock"])
def test_what_a_live_tensor_cannot_hold_is_refused_before_anything_changes(tmp_path, kind, saved):
    first, second = train(make("a", kind=kind)), make("a", kind=kind, rates={"a": 0.5})
    next(iter(first.optimizers.values())).param_groups[0]["own"] = saved
    first.save_dcp(tmp_path / "x")
    (optimizer,) = second.optimizers.values()
    optimizer.param_groups[0]["own"] = held = torch.tensor(7.0)
    before = [param.clone() for param in second.model.parameters()]
    with pytest.raises(CheckpointMismatch, match="1 kind") as caught:
        second.load_dcp(tmp_path / "x")
    assert "kind: optimizer[0] own (a hyperparameter is of another kind" in caught.value.found
    assert optimizer.param_groups[0]["own"] is held
    assert (held.item(), optimizer.param_groups[0]["lr"]) == (7.0, 0.5)
    assert all(map(torch.equal, before, second.model.parameters()))
    second.require_ready()
    second.load_dcp(tmp_path / "x", load_args=False)
    assert optimizer.param_groups[0]["own"] is held


@pytest.mark.parametrize("schedule", [SCHEDULES["lambda"], SCHEDULES["restarts"]], ids=["lambda", "restarts"])
def test_a_group_of_a_flattened_file_of_torchs_that_is_two_now_has_its_schedule_twice(tmp_path, schedule):
    first = train(make("ab|c", kind=optim.AdamW, schedule=schedule))
    (optimizer,) = first.optimizers.values()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, state = get_state_dict(first.model, optimizer, options=options)
    parts = {"model": model, "optimizer": state, "scheduler": first.scheduler.state_dict()}
    dcp.save(parts, checkpoint_id=tmp_path / "x")
    second = make("b|c|a", kind=optim.AdamW, schedule=schedule, rates=dict.fromkeys(RATES, 0.5))
    second.load_dcp(tmp_path / "x")
    for engine in (first, second):
        train(engine, 3, start=2)
    assert_same(first, second)


@pytest.mark.parametrize("layout", ["nested", "flattened"])
@pytest.mark.parametrize("key", ["lr", "betas"])
def test_a_hyperparameter_that_was_saved_and_is_gone_is_an_error(tmp_path, layout, key):
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    engine = orlop.TrainEngine(model, torch.optim.AdamW(model.parameters(), lr=0.125))
    engine.save_dcp(tmp_path / "x", optimizer_layout=layout)
    assert not [finding for finding in orlop.verify(tmp_path / "x") if finding.is_fault]
    rewrite(tmp_path / "x", drop(rf"optimizer\.param_groups\..*\.{key}(\..*)?"))
    live = torch.optim.AdamW(model.parameters(), lr=0.5, betas=(0.5, 0.5))
    with pytest.raises(CheckpointIncomplete) as caught:
        orlop.TrainEngine(model, live).load_dcp(tmp_path / "x")
    assert f"lost: optimizer.param_groups.0.{key} (" in str(caught.value)
    assert (live.param_groups[0]["lr"], live.param_groups[0]["betas"]) == (0.5, (0.5, 0.5))
    found = [finding.where for finding in orlop.verify(tmp_path / "x") if finding.kind == "lost"]
    assert found == [f"optimizer.param_groups.0.{key}"]
    orlop.TrainEngine(model, live).load_dcp(tmp_path / "x", load_args=False)
