"""Every leaf has one verdict: real checkpoints, loaded through the engine and the store, in one process."""

import logging

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.rewriting import drop, keys, rewrite
from tests.unit.kinds import change_kind, is_swapped, kind, of_kind  # noqa: F401
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from orlop.checkpoints import CheckpointStore
from orlop.engine import TrainEngine
from orlop.errors import CheckpointIncomplete, CheckpointMismatch, CheckpointUnsafe
from orlop.resume import LoadPolicy
from orlop.state.fingerprint import fingerprint
from orlop.store.manifest import read_manifest, write_manifest
from orlop.trainer import Trainer


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 4)
        self.b = nn.Linear(4, 2)
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def make(optimizer_class=torch.optim.AdamW, *, model=None, seed=0, groups=None, **options):
    """An engine over `model`, or over what it makes."""
    torch.manual_seed(seed)
    model = model if isinstance(model, nn.Module) else (model or Net)()
    params = model.parameters() if groups is None else groups(model)
    return TrainEngine(model, of_kind(optimizer_class)(params, **{"lr": 1e-2, **options}))


def train(engine, steps=2, start=0):
    for step in range(start, start + steps):
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))
        engine.train_step([x], lambda model, batch: model(batch).square().mean())
        assert engine.step_optimizer(engine.clip_grad_norm())
    return engine


def snapshot(engine):
    """Model, optimizer state and group values, by name."""
    values = {name: value.clone() for name, value in engine.model.state_dict().items()}
    names = {param: name for name, param in engine.model.named_parameters()}
    for label, optimizer in engine.optimizers.items():
        for param, state in optimizer.state.items():
            for key, value in state.items():
                values[f"{label}.{names[param]}.{key}"] = (
                    value.clone() if isinstance(value, torch.Tensor) else value
                )
        for index, group in enumerate(optimizer.param_groups):
            values |= {f"{label}.{index}.{k}": v for k, v in group.items() if k != "params"}
    return values


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        same = torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
        assert same, name


def refused(engine, path, error=CheckpointMismatch, **options):
    """The error of a load that must change nothing."""
    before = snapshot(engine)
    with pytest.raises(error) as caught:
        engine.load_dcp(path, **options)
    assert_same(before, snapshot(engine))
    return str(caught.value)


class Part:
    def __init__(self, value=0):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


# -- lost, absent, nothing there -----------------------------------------------------------------------------


def test_lost_is_not_absent(tmp_path):
    train(make()).save_dcp(tmp_path / "x")
    rewrite(tmp_path / "x", drop(r"optimizer\.state\.a\.weight\..*"))
    other = make(seed=3)
    text = refused(other, tmp_path / "x", CheckpointIncomplete)
    assert "lost: optimizer.state.a.weight" in text
    assert "unused" not in text  # never stepped: that is recorded, and no fault
    report = other.load_dcp(tmp_path / "x", policy=LoadPolicy(reset_damaged=("a.weight",)))
    assert [finding.leaf for finding in report.of("reset")] == ["optimizer.state.a.weight"]
    # Without orlop's record nothing says that there was state.
    rewrite(tmp_path / "x", drop(), keep_record=False)
    absent = make(seed=3).load_dcp(tmp_path / "x").of("absent")
    assert "optimizer.state.a.weight" in {finding.leaf for finding in absent}


def test_a_lost_part_and_a_lost_optimizer_are_named(tmp_path):
    engine = train(make())
    engine.parts["data"] = Part(4)
    engine.save_dcp(tmp_path / "x")
    rewrite(tmp_path / "x", drop("data"))
    other = make(seed=3)
    other.parts["data"] = Part(9)
    policy = LoadPolicy(allow_missing=True)
    assert "lost: data" in refused(other, tmp_path / "x", CheckpointIncomplete, policy=policy)
    assert other.parts["data"].value == 9
    rewrite(tmp_path / "x", drop(r"optimizer\..*"))
    del other.parts["data"]
    assert "lost: optimizer" in refused(other, tmp_path / "x", CheckpointIncomplete, policy=policy)


def test_saved_before_the_first_step_everything_is_absent(tmp_path):
    make().save_dcp(tmp_path / "x")
    report = make(seed=1).load_dcp(tmp_path / "x")
    assert set(report.counts) == {"loaded", "absent"}
    assert report.counts["absent"] == 6


def test_another_prefix_is_an_error_that_no_policy_hides_and_that_names_the_prefix(tmp_path):
    first = train(make())
    first.save_dcp(tmp_path / "x", key_prefix="run.")
    other = make(seed=3)
    everything = LoadPolicy(
        allow_missing=True, allow_unexpected=True, allow_weights_only=True, cast_dtypes=True
    )
    for policy in (LoadPolicy(), everything):
        text = refused(other, tmp_path / "x", policy=policy)
        assert "layout: model" in text
        assert "load with key_prefix='run.'" in text
        assert "'run.model.a.bias'" in text
        assert "'model.a.bias'" in text
    other.load_dcp(tmp_path / "x", key_prefix="run.")
    assert_same(snapshot(first), snapshot(other))


def test_f03_disjoint_models_are_an_error_with_examples_of_both_sides(tmp_path):
    train(make()).save_dcp(tmp_path / "x")
    other = TrainEngine(
        other_model := nn.Sequential(nn.Linear(3, 3)), torch.optim.SGD(other_model.parameters())
    )
    policy = LoadPolicy(allow_missing=True, allow_unexpected=True, allow_other_class=True)
    text = refused(other, tmp_path / "x", policy=policy)
    assert "model.0.weight" in text
    assert "model.a.bias" in text


def test_state_under_another_name_is_not_taken_for_weights_only(tmp_path):
    train(make()).save_dcp(tmp_path / "x")

    def rename(flat):
        for key in [key for key in flat if key.startswith("optimizer.")]:
            flat[f"optim.{key.removeprefix('optimizer.')}"] = flat.pop(key)

    rewrite(tmp_path / "x", rename, keep_record=False)
    text = refused(make(seed=3), tmp_path / "x")
    assert "its state is under 'optim.state.' in the checkpoint, and 'optimizer.state.' is expected" in text


def test_e07_state_by_position_is_refused_with_a_reason(tmp_path):
    engine = train(make())
    raw = {"model": engine.model.state_dict(), "optimizer": engine.optimizers["optimizer"].state_dict()}
    dcp.save(raw, checkpoint_id=tmp_path / "x")
    text = refused(make(seed=3), tmp_path / "x")
    assert "by their position in an optimizer" in text
    text = refused(make(seed=3), tmp_path / "x", load_args=False)
    assert "those are positions in one optimizer's lists" in text


def test_e07_the_ways_out_that_the_message_names_hold(tmp_path):
    engine = train(make())
    (optimizer,) = engine.optimizers.values()
    raw = {"model": engine.model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(raw, checkpoint_id=tmp_path / "x")
    text = refused(make(seed=3), tmp_path / "x")
    assert "weights alone load with load_states=False, load_args=False" in text
    assert "read it with dcp.load into the state_dict() of an optimizer that is built as then" in text
    weights = make(seed=3)
    weights.load_dcp(tmp_path / "x", load_states=False, load_args=False)
    assert all(torch.equal(a, b) for a, b in zip(weights.model.parameters(), engine.model.parameters()))
    if not is_swapped():
        return  # a fresh stock optimizer has no state to read into
    whole = make(seed=3)
    (target,) = whole.optimizers.values()
    state = {"model": whole.model.state_dict(), "optimizer": target.state_dict()}
    for key in state["optimizer"]["state"].keys() - raw["optimizer"]["state"].keys():
        del state["optimizer"]["state"][key]
    dcp.load(state, checkpoint_id=tmp_path / "x")
    whole.model.load_state_dict(state["model"])
    target.load_state_dict(state["optimizer"])
    assert fingerprint(engine) == fingerprint(whole)


def test_one_of_two_optimizers_that_is_not_there_is_missing(tmp_path):
    def build(seed, *names):
        torch.manual_seed(seed)
        net = Net()
        cls = of_kind(torch.optim.AdamW)
        every = {"first": cls(net.a.parameters(), lr=1e-2), "second": cls(net.b.parameters(), lr=1e-2)}
        return TrainEngine(net, {name: every[name] for name in names})

    both = train(build(0, "first", "second"))
    both.save_dcp(tmp_path / "both")
    again = build(5, "first", "second")
    again.load_dcp(tmp_path / "both")
    assert_same(snapshot(both), snapshot(again))
    train(build(0, "first")).save_dcp(tmp_path / "one")
    assert "missing: second" in refused(build(5, "first", "second"), tmp_path / "one")


# -- weights only --------------------------------------------------------------------------------------------


def test_auto_resume_refuses_weights_only_unless_told_to(tmp_path, caplog):
    first = train(make())
    dcp.save({"model": first.model.state_dict()}, checkpoint_id=tmp_path / "step-00000002")
    store = CheckpointStore(tmp_path)
    other = train(make(seed=3), 1)
    before = snapshot(other)
    for policy in (None, LoadPolicy(allow_missing=True, allow_unexpected=True)):
        with pytest.raises(CheckpointMismatch, match="weights only"):
            store.resume(other, policy=policy)
        assert_same(before, snapshot(other))
    with pytest.raises(CheckpointMismatch, match=r"allow_weights_only=True"):
        Trainer(make(seed=3), store, [], total_steps=5, save_every=5).run()
    with caplog.at_level(logging.WARNING, logger="orlop"):
        resumed = store.resume(other, policy=LoadPolicy(allow_weights_only=True))
    assert resumed.step == 2
    assert "weights only" in str(resumed.report)
    assert (
        "1 optimizer is not there: the checkpoint holds weights only; fresh state: optimizer" in caplog.text
    )
    assert torch.equal(other.model.a.weight, first.model.a.weight)
    # Asked for by its path, it is loaded.
    make(seed=4).load_dcp(tmp_path / "step-00000002")


def test_a_save_without_the_optimizer_is_weights_only(tmp_path):
    engine = train(make())
    engine.parts["data"] = Part(4)
    engine.save_dcp(tmp_path / "step-00000002", save_optimizer=False)
    other = make(seed=3)
    other.parts["data"] = Part()
    with pytest.raises(CheckpointMismatch, match="weights only"):
        CheckpointStore(tmp_path).resume(other)
    other.load_dcp(tmp_path / "step-00000002")
    assert other.parts["data"].value == 4


# -- missing, unexpected, left out ---------------------------------------------------------------------------


def adapter(seed):
    torch.manual_seed(seed)
    net = Net()
    net.a.requires_grad_(False)
    return make(model=net, seed=seed)


def test_freezing_does_not_switch_strictness_off(tmp_path):
    train(adapter(0)).save_dcp(tmp_path / "x")
    rewrite(tmp_path / "x", drop("model.a.weight", "model.a.bias"))
    text = refused(adapter(1), tmp_path / "x")
    assert "missing: model.a.weight" in text
    assert "missing: model.a.bias" in text


def test_f11_what_was_left_out_is_not_expected_and_all_else_is(tmp_path):
    first = train(adapter(0))
    first.save_dcp(tmp_path / "x", include_frozen=False)
    assert read_manifest(tmp_path / "x").left_out == ["a.weight", "a.bias"]
    # A run in which the base trains again: it was left out all the same.
    thawed = make(seed=1)
    report = thawed.load_dcp(tmp_path / "x")
    assert [finding.leaf for finding in report.of("left out")] == ["model.a.weight", "model.a.bias"]
    rewrite(tmp_path / "x", drop("model.b.weight"))
    assert "missing: model.b.weight" in refused(adapter(1), tmp_path / "x")


def test_a_parameter_that_trained_and_was_frozen_keeps_its_state(tmp_path):
    first = train(make())
    first.model.a.requires_grad_(False)
    first.save_dcp(tmp_path / "x", include_frozen=False)
    second = adapter(5)
    second.load_dcp(tmp_path / "x")
    (one,), (other,) = first.optimizers.values(), second.optimizers.values()
    assert torch.equal(
        one.state[first.model.a.weight]["exp_avg"], other.state[second.model.a.weight]["exp_avg"]
    )


def test_a06_a_new_layer_starts_fresh_when_missing_is_allowed(tmp_path):
    first = train(make())
    first.save_dcp(tmp_path / "x")
    net = Net()
    net.new = nn.Linear(2, 2)
    second = make(model=net, seed=4)
    text = refused(second, tmp_path / "x", load_args=False)
    assert "missing: model.new.weight" in text
    report = second.load_dcp(tmp_path / "x", load_args=False, policy=LoadPolicy(allow_missing=True))
    assert [finding.leaf for finding in report.of("kept")] == ["model.new.weight", "model.new.bias"]
    assert "optimizer.state.new.weight" in {finding.leaf for finding in report.of("absent")}
    assert not report.of("lost")
    assert torch.equal(net.a.weight, first.model.a.weight)


def test_parts_that_are_not_here_are_listed_and_left_alone(tmp_path):
    engine = train(make())
    engine.parts["data"] = Part(4)
    engine.save_dcp(tmp_path / "x")
    report = make(seed=3).load_dcp(tmp_path / "x")
    assert [(f.leaf, f.detail) for f in report.of("ignored")] == [
        ("data", "1 leaf of a part that is not here")
    ]


def test_a_switched_off_moment_that_was_stored_as_none_carries_nothing(tmp_path):
    first = train(make())
    first.save_dcp(tmp_path / "x")
    rewrite(tmp_path / "x", lambda flat: flat.update({"optimizer.state.a.weight.max_exp_avg_sq": None}))
    second = make(seed=3)
    report = second.load_dcp(tmp_path / "x")
    assert [finding.leaf for finding in report.of("ignored")] == ["optimizer.state.a.weight.max_exp_avg_sq"]
    assert_same(snapshot(first), snapshot(second))


@pytest.mark.parametrize(
    ("saved", "live", "found"),
    [
        (nn.Linear(2, 3), nn.Linear(2, 4), "part: weight: expected (4, 2), found (3, 2)"),
        (nn.Linear(2, 3), nn.Linear(2, 3, bias=False), "part: 1 entry more than here: bias"),
        (torch.amp.GradScaler("cpu", enabled=False), torch.amp.GradScaler("cpu"), "that was disabled"),
    ],
)
def test_a_part_that_would_refuse_is_known_before_anything_changes(tmp_path, saved, live, found):
    first = train(make())
    first.parts["part"] = saved
    first.save_dcp(tmp_path / "x")
    second = make(seed=3)
    second.parts["part"] = live
    text = refused(second, tmp_path / "x")
    assert "unfit: part (" in text
    assert found.removeprefix("part: ") in text
    train(second)  # nothing is half-loaded


def test_state_of_nothing_but_none_is_no_state(tmp_path):
    first = train(make())
    first.save_dcp(tmp_path / "x")
    nothing = {f"optimizer.state.unused.weight.{key}": None for key in ("step", "exp_avg", "exp_avg_sq")}
    rewrite(tmp_path / "x", lambda flat: flat.update(nothing), keep_record=False)
    second = train(make(seed=3))
    report = second.load_dcp(tmp_path / "x")
    assert "optimizer.state.unused.weight" in [finding.leaf for finding in report.of("absent")]
    assert_same(snapshot(first), snapshot(second))
    lost = {f"optimizer.state.a.weight.{key}": None for key in ("step", "exp_avg", "exp_avg_sq")}
    first.save_dcp(tmp_path / "y")
    rewrite(tmp_path / "y", lambda flat: flat.update(lost))
    assert "lost: optimizer.state.a.weight" in refused(second, tmp_path / "y", CheckpointIncomplete)


def test_a_number_where_a_tensor_is_expected_is_another_kind(tmp_path):
    train(make()).save_dcp(tmp_path / "x")
    rewrite(tmp_path / "x", lambda flat: flat.update({"optimizer.state.a.weight.step": 2}))
    text = refused(make(seed=3), tmp_path / "x")
    assert "kind: optimizer.state.a.weight.step (expected a tensor, found plain data)" in text


@pytest.mark.parametrize("live, saved", [((1,), ()), ((), (1,)), ((2, 3), (4, 3)), ((12,), (4, 3))])
def test_f02_shapes_differ_by_name_and_both_shapes(tmp_path, live, saved):
    def build(shape):
        model = nn.Module()
        model.w = nn.Parameter(torch.ones(shape))
        return make(model=model)

    build(saved).save_dcp(tmp_path / "x")
    text = refused(build(live), tmp_path / "x")
    assert f"shape: model.w (expected {live}, found {saved})" in text


def test_f01_narrowing_is_refused_and_cast_only_when_asked_for(tmp_path):
    def build(dtype, value):
        model = nn.Module()
        model.w = nn.Parameter(torch.full((2,), value, dtype=dtype))
        return make(model=model)

    build(torch.float32, 77.3).save_dcp(tmp_path / "x")
    other = build(torch.bfloat16, 1.0)
    policy = LoadPolicy(allow_missing=True, allow_unexpected=True)
    text = refused(other, tmp_path / "x", policy=policy)
    assert "dtype: model.w (expected torch.bfloat16, found torch.float32)" in text
    report = other.load_dcp(tmp_path / "x", policy=LoadPolicy(cast_dtypes=True))
    assert [finding.leaf for finding in report.of("cast")] == ["model.w"]


# -- groups and classes --------------------------------------------------------------------------------------


def test_another_optimizer_class_is_refused_by_both_names(tmp_path):
    train(make()).save_dcp(tmp_path / "x")
    other = make(torch.optim.Adam, seed=3)
    text = refused(other, tmp_path / "x")
    assert "class: optimizer (saved by AdamW, and this run has Adam)" in text
    report = other.load_dcp(tmp_path / "x", load_states=False, load_args=False)
    assert next(fact for fact in report.facts if fact.name == "class of optimizer").recorded == "AdamW"
    other.load_dcp(tmp_path / "x", policy=LoadPolicy(allow_other_class=True))  # of the same state
    assert other.optimizers["optimizer"].state[other.model.a.weight]["step"] == 2


def test_stock_and_host_resident_runs_are_of_one_class(tmp_path, monkeypatch):
    first = train(make())
    first.save_dcp(tmp_path / "x")
    change_kind(monkeypatch)
    second = make(seed=3)
    second.load_dcp(tmp_path / "x")
    for engine in (first, second):
        train(engine, 2, start=2)
    assert torch.equal(first.model.a.weight, second.model.a.weight)


@pytest.mark.parametrize("optimizer_class, old", [(torch.optim.AdamW, True), (torch.optim.Adam, False)])
def test_an_option_that_torch_added_later_keeps_the_old_maths(tmp_path, caplog, optimizer_class, old):
    first = train(make(optimizer_class))
    (group,) = first.optimizers["optimizer"].param_groups
    if "decoupled_weight_decay" not in group:
        pytest.skip("this torch has no such option")
    first.save_dcp(tmp_path / "x")
    rewrite(tmp_path / "x", drop(r".*decoupled_weight_decay"), keep_record=False)
    second = make(optimizer_class, seed=3)
    (live,) = second.optimizers["optimizer"].param_groups
    live["decoupled_weight_decay"] = not old
    with caplog.at_level(logging.INFO, logger="orlop"):
        report = second.load_dcp(tmp_path / "x")
    assert live["decoupled_weight_decay"] is old
    assert f"knows no decoupled_weight_decay; set to {old}" in caplog.text
    assert [(d.key, d.saved) for d in report.differences] == [("decoupled_weight_decay", str(old))]


def test_differences_are_listed_whichever_side_wins(tmp_path):
    train(make(lr=1e-2)).save_dcp(tmp_path / "x")
    second = make(lr=0.5, seed=3)
    report = second.load_dcp(tmp_path / "x", load_args=False)
    assert second.optimizers["optimizer"].param_groups[0]["lr"] == 0.5
    assert [(d.key, d.live, d.saved, d.taken) for d in report.differences] == [("lr", "0.5", "0.01", False)]
    assert "optimizer[0] lr: 0.5 kept, 0.01 was saved" in str(report)


def split(model):
    return [{"params": model.a.parameters(), "lr": 0.1}, {"params": model.b.parameters(), "lr": 0.2}]


def test_an_empty_group_keeps_its_values(tmp_path):
    def groups(lr):
        return lambda model: [*split(model), {"params": [], "lr": lr}]

    train(make(groups=groups(0.3))).save_dcp(tmp_path / "x")
    second = make(groups=groups(0.9), seed=3)
    second.load_dcp(tmp_path / "x")
    assert [group["lr"] for group in second.optimizers["optimizer"].param_groups] == [0.1, 0.2, 0.3]
    with pytest.raises(CheckpointMismatch, match="group 2"):
        second.save_dcp(tmp_path / "flat", optimizer_layout="flattened")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_e05_the_flattened_layout_is_torchs_own_and_is_read_back(tmp_path):
    first = train(make(groups=split))
    first.save_dcp(tmp_path / "x", optimizer_layout="flattened")
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    (optimizer,) = first.optimizers.values()
    theirs = get_optimizer_state_dict(first.model, optimizer, options=options)
    assert {f"optimizer.{key}" for key in theirs} == {
        key for key in keys(tmp_path / "x") if "optimizer." in key
    }
    second = make(groups=split, seed=3)
    second.load_dcp(tmp_path / "x")
    assert_same(snapshot(first), snapshot(second))
    # Plain DCP finds its own layout.
    dcp.load(template := {"optimizer": dict(theirs)}, checkpoint_id=tmp_path / "x")
    third = make(groups=split, seed=4)
    set_optimizer_state_dict(
        third.model, third.optimizers["optimizer"], template["optimizer"], options=options
    )
    # Groups that would merge two learning rates, or lack a parameter, are refused with both sides.
    assert "different hyperparameters" in refused(
        make(groups=lambda m: [*m.a.parameters(), *m.b.parameters()], seed=3), tmp_path / "x"
    )
    text = refused(make(groups=lambda m: m.a.parameters(), seed=3), tmp_path / "x")
    assert "unexpected: optimizer.param_groups (only in its groups: b." in text, text


def test_a_model_at_the_top_level_is_found_there(tmp_path):
    """What torchtitan writes: the model's names without `model.`, the optimizer flattened, parts of its own."""
    first = train(make())
    (optimizer,) = first.optimizers.values()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    theirs = {
        **get_model_state_dict(first.model),
        "optimizer": get_optimizer_state_dict(first.model, optimizer, options=options),
        "train_state": {"step": 2},
    }
    dcp.save(theirs, checkpoint_id=tmp_path / "x")
    second = make(seed=3)
    report = second.load_dcp(tmp_path / "x")
    assert [finding.leaf for finding in report.of("ignored")] == ["train_state"]
    assert_same(snapshot(first), snapshot(second))
    weights = make(seed=4)
    dcp.save(get_model_state_dict(first.model), checkpoint_id=tmp_path / "weights")
    assert weights.load_dcp(tmp_path / "weights").counts["fresh"] == 1
    assert torch.equal(weights.model.a.weight, first.model.a.weight)
    # A leaf more or less is found as ever.
    rewrite(tmp_path / "x", drop(r"b\.weight"), keep_record=False)
    assert "missing: b.weight" in refused(second, tmp_path / "x")
    rewrite(
        tmp_path / "x",
        lambda flat: flat.update({"b.weight": flat["b.bias"], "b.more": flat["b.bias"]}),
        keep_record=False,
    )
    text = refused(second, tmp_path / "x")
    assert "shape: b.weight" in text
    assert "unexpected: b.more" in text


def test_a04_absence_is_the_same_in_the_flattened_layout(tmp_path):
    first = train(make())
    first.save_dcp(tmp_path / "x", optimizer_layout="flattened")
    second = make(seed=3)
    report = second.load_dcp(tmp_path / "x")
    assert len(report.of("absent")) == 2
    assert_same(snapshot(first), snapshot(second))


def test_materialized_absence_is_for_other_readers_only(tmp_path):
    first = train(make())
    first.save_dcp(tmp_path / "x", materialize_absent=True)
    # A template of torch's own expects state of every parameter that trains.
    plain = Net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.3)
    template = {
        "model": get_model_state_dict(plain),
        "optimizer": get_optimizer_state_dict(plain, optimizer),
    }
    dcp.load(template, checkpoint_id=tmp_path / "x")
    moments = template["optimizer"]["state"]["unused.weight"]
    assert moments["step"] == 0
    assert not moments["exp_avg"].any()
    assert torch.equal(template["model"]["a.weight"], first.model.a.weight)
    second = make(seed=3)
    report = second.load_dcp(tmp_path / "x")
    assert len(report.of("absent")) == 2
    for engine in (first, second):
        assert read_manifest(tmp_path / "x").absent == {"optimizer": ["unused.weight", "unused.bias"]}
        engine.model.unused.weight.grad = torch.ones(2, 2)
        assert engine.step_optimizer(1.0)
    assert_same(snapshot(first), snapshot(second))


def test_state_that_only_a_gradient_can_begin_is_not_made_up(tmp_path):
    first = train(make(torch.optim.SGD, momentum=0.9, dampening=0.5))
    first.save_dcp(tmp_path / "x", materialize_absent=True)
    assert not any("unused" in key and ".state." in key for key in keys(tmp_path / "x"))


# -- parameters of every kind --------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self, tied=True):
        super().__init__()
        self.a = nn.Linear(3, 3, bias=False)
        self.b = nn.Linear(3, 3, bias=False)
        if tied:
            self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(x))


def test_a20_a_tied_weight_is_stored_once_and_read_by_both_names(tmp_path):
    first = train(make(model=Tied))
    first.save_dcp(tmp_path / "x")
    assert read_manifest(tmp_path / "x").aliases == {"b.weight": "a.weight"}
    metadata = FileSystemReader(tmp_path / "x").read_metadata()
    places = {
        index.fqn: (place.relative_path, place.offset) for index, place in metadata.storage_data.items()
    }
    assert places["model.a.weight"] == places["model.b.weight"]
    plain = {"model": Tied().state_dict()}  # both names, as plain DCP asks for them
    dcp.load(plain, checkpoint_id=tmp_path / "x")
    assert torch.equal(plain["model"]["b.weight"], first.model.a.weight)
    second = make(model=Tied, seed=3)
    report = second.load_dcp(tmp_path / "x")
    assert set(report.counts) == {"loaded"}
    assert second.model.b.weight is second.model.a.weight
    assert_same(snapshot(first), snapshot(second))


def test_a20_tied_when_saved_and_not_tied_now(tmp_path):
    first = train(make(model=Tied))
    first.save_dcp(tmp_path / "x")
    second = make(model=lambda: Tied(tied=False), seed=3)
    second.load_dcp(tmp_path / "x")
    (one,), (other,) = first.optimizers.values(), second.optimizers.values()
    expected = one.state[first.model.a.weight]
    for weight in (second.model.a.weight, second.model.b.weight):
        assert torch.equal(weight, first.model.a.weight)
        assert other.state[weight]["step"] == 2
        assert torch.equal(other.state[weight]["exp_avg"], expected["exp_avg"])
    assert other.state[second.model.a.weight]["exp_avg"] is not other.state[second.model.b.weight]["exp_avg"]


def test_a20_two_tensors_are_not_made_one_in_silence(tmp_path):
    first = train(make(model=lambda: Tied(tied=False)))
    first.save_dcp(tmp_path / "x")
    second = make(model=Tied, seed=3)
    assert "untied: model.b.weight" in refused(second, tmp_path / "x")
    report = second.load_dcp(tmp_path / "x", policy=LoadPolicy(allow_unexpected=True))
    assert [finding.leaf for finding in report.of("ignored")] == ["model.b.weight"]
    assert torch.equal(second.model.a.weight, first.model.a.weight)


class Marked(torch.Tensor):
    """A tensor class of the user's own."""


def test_tensor_classes_are_saved_when_they_are_registered(tmp_path):
    class Calibration(Part):
        def state_dict(self):
            return {"value": torch.arange(3.0).as_subclass(Marked)}

    engine = train(make())
    engine.model.register_buffer("scales", torch.ones(3).as_subclass(Marked))
    engine.parts["calibration"] = Calibration()
    with pytest.raises(CheckpointUnsafe, match=r"add_safe_globals\(\[Marked\]\)") as caught:
        engine.save_dcp(tmp_path / "x")
    assert "scales" in str(caught.value.where)
    assert list(tmp_path.iterdir()) == []
    with torch.serialization.safe_globals([Marked]):
        engine.save_dcp(tmp_path / "x")
        other = make(seed=3)
        other.model.register_buffer("scales", torch.zeros(3).as_subclass(Marked))
        other.parts["calibration"] = Part()
        other.load_dcp(tmp_path / "x")
    assert type(other.model.scales) is Marked
    assert torch.equal(other.model.scales, torch.ones(3))
    assert torch.equal(other.parts["calibration"].value.as_subclass(torch.Tensor), torch.arange(3.0))


def test_e04_a_group_that_holds_a_class_is_refused_by_name(tmp_path):
    engine = train(make())
    engine.optimizers["optimizer"].param_groups[0]["kind"] = Net
    with pytest.raises(CheckpointUnsafe) as caught:
        engine.save_dcp(tmp_path / "x")
    assert caught.value.where == "optimizer.kind"
    assert list(tmp_path.iterdir()) == []


class Odd(nn.Module):
    """0-dim, one-element, empty and never used parameters."""

    def __init__(self):
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.one = nn.Parameter(torch.ones(1))
        self.empty = nn.Parameter(torch.ones(0, 3))
        self.linear = nn.Linear(3, 2)

    def forward(self, x):
        return self.linear(x) * self.scalar * self.one + self.empty.sum()


def test_shapes_of_every_kind_go_on_bit_equal(tmp_path):
    whole = train(make(model=Odd), 4)
    train(make(model=Odd), 2).save_dcp(tmp_path / "x")
    second = make(model=Odd, seed=3)
    second.load_dcp(tmp_path / "x")
    assert_same(snapshot(whole), snapshot(train(second, 2, start=2)))


def test_gradients_that_are_left_over_are_neither_saved_nor_touched_nor_stepped(tmp_path):
    first = train(make())
    first.model.a.weight.grad = one = torch.ones(4, 3)
    first.save_dcp(tmp_path / "x")
    second = make(seed=3)
    second.model.b.weight.grad = other = torch.full((2, 4), 2.0)
    second.load_dcp(tmp_path / "x")
    assert_same(snapshot(first), snapshot(second))
    assert first.model.a.weight.grad is one
    assert second.model.b.weight.grad is other
    assert torch.equal(other, torch.full((2, 4), 2.0))
    # They are of other weights than those that were loaded: the engine's next step does without them.
    first.model.a.weight.grad = None
    assert_same(snapshot(train(first, start=2)), snapshot(train(second, start=2)))


def test_a_scaler_that_skipped_the_only_step_leaves_every_state_absent(tmp_path):
    engine = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    (optimizer,) = engine.optimizers.values()
    loss = engine.model(torch.ones(2, 3)).sum() * float("inf")
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    engine.parts["scaler"] = scaler
    engine.save_dcp(tmp_path / "x")
    second = make(seed=3)
    second.parts["scaler"] = torch.amp.GradScaler("cpu", init_scale=64.0)
    report = second.load_dcp(tmp_path / "x")
    assert report.counts["absent"] == 6
    assert second.parts["scaler"].get_scale() == 2.0
    assert_same(snapshot(train(make())), snapshot(train(second)))


def test_a27_never_stepped_stays_never_stepped_under_dampening(tmp_path):
    options = {"momentum": 0.9, "dampening": 0.5}
    first = train(make(torch.optim.SGD, **options))
    first.save_dcp(tmp_path / "x")
    second = make(torch.optim.SGD, seed=3, **options)
    second.load_dcp(tmp_path / "x")
    for engine in (first, second):
        engine.model.unused.weight.grad = torch.ones(2, 2)
        assert engine.step_optimizer(1.0)
    buffer = second.optimizers["optimizer"].state[second.model.unused.weight]["momentum_buffer"]
    assert torch.equal(buffer, torch.ones(2, 2))  # the gradient itself, without dampening
    assert_same(snapshot(first), snapshot(second))


def test_f06_the_second_save_of_a_resumed_run_is_as_right_as_the_first(tmp_path):
    first = train(make())
    first.parts["data"] = Part(7)
    first.save_dcp(tmp_path / "1")
    second = make(seed=3)
    second.parts["data"] = part = Part()
    second.load_dcp(tmp_path / "1")
    assert second.parts["data"] is part
    assert part.value == 7
    train(second, 1, start=2)
    part.value = 8
    second.save_dcp(tmp_path / "2")
    third = make(seed=4)
    third.parts["data"] = Part()
    third.load_dcp(tmp_path / "2")
    assert third.parts["data"].value == 8
    assert_same(snapshot(second), snapshot(third))


# -- the report ----------------------------------------------------------------------------------------------


def test_the_report_counts_lists_and_compares(tmp_path, caplog):
    train(make(lr=1e-2)).save_dcp(tmp_path / "x")
    other_facts = {"torch_version": "2.6.0", "world_size": 8, "meshes": ["dp=8"]}
    write_manifest(tmp_path / "x", read_manifest(tmp_path / "x").model_copy(update=other_facts))
    second = make(lr=0.5, seed=3)
    with caplog.at_level(logging.WARNING, logger="orlop"):
        report = second.load_dcp(tmp_path / "x")
    assert len([record for record in caplog.records if record.name == "orlop"]) == 1
    assert report.counts == {"loaded": 6 + 4 * 3, "absent": 2}
    loaded = [value for name, value in snapshot(second).items() if not name.startswith("optimizer.unused")]
    assert report.bytes_needed == sum(value.nbytes for value in loaded if isinstance(value, torch.Tensor))
    assert report.bytes_read >= report.bytes_needed
    assert {fact.name for fact in report.facts if fact.differs} == {"world size", "mesh", "torch"}
    text = str(report)
    assert "world size: 8 when saved, 1 now" in text
    assert "mesh: dp=8 when saved, none now" in text
    assert "optimizer[0] lr: 0.5 -> 0.01" in text
    assert len(text.splitlines()) < 15


def test_one_warning_has_the_count_and_five_names(tmp_path, caplog):
    def build(seed):
        torch.manual_seed(seed)
        net = Net()
        net.spare = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(7))
        return make(model=net, seed=seed)

    train(build(0)).save_dcp(tmp_path / "x")
    with caplog.at_level(logging.WARNING, logger="orlop"):
        build(1).load_dcp(tmp_path / "x")
    (warning,) = [record.message for record in caplog.records if record.name == "orlop"]
    assert warning.startswith("9 parameters have no state")
    assert warning.count("optimizer.state.") == 5
    assert warning.endswith(", …")
