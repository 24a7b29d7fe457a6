"""Saving and loading in one process: what is saved, what is refused, and what a load leaves alone."""

import copy
import logging
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.rewriting import keys, rewrite
from tests.unit.kinds import is_swapped, kind, of_kind  # noqa: F401
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from orlop.checkpoints import CheckpointStore
from orlop.engine import TrainEngine
from orlop.errors import (
    CheckpointCorrupt,
    CheckpointExists,
    CheckpointIncomplete,
    CheckpointMismatch,
    CheckpointNotFound,
    CheckpointUnsafe,
    ParameterReplaced,
    StorageRefused,
)
from orlop.resume import LoadPolicy
from orlop.save import save_checkpoint
from orlop.state.fingerprint import fingerprint
from orlop.store.manifest import read_manifest
from orlop.trainer import Trainer


def is_fresh(engine, param):
    """Stock optimizers have no state for it; host-resident ones know that it never stepped."""
    (optimizer,) = engine.optimizers.values()
    return not optimizer.stepped(param) if is_swapped() else not optimizer.state.get(param)


def all_fresh(engine):
    return all(is_fresh(engine, param) for param in engine.model.parameters() if param.requires_grad)


class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.a = nn.Linear(3, width)
        self.b = nn.Linear(width, 2)
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def make(optimizer_class=torch.optim.AdamW, *, model=None, scheduler=True, seed=0, **options):
    torch.manual_seed(seed)
    model = Net() if model is None else model
    optimizer = of_kind(optimizer_class)(model.parameters(), **{"lr": 1e-2, **options})
    steps = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) if scheduler else None
    return TrainEngine(model, optimizer, steps)


def train(engine, step):
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))
    loss = engine.train_step([x], lambda model, batch: model(batch).square().mean())
    assert engine.step_optimizer(engine.clip_grad_norm())
    if engine.scheduler is not None:
        engine.scheduler.step()
    return loss


def trained(steps=2, **options):
    engine = make(**options)
    for step in range(steps):
        train(engine, step)
    return engine


def snapshot(engine):
    (optimizer,) = engine.optimizers.values()
    values = {name: value.clone() for name, value in engine.model.state_dict().items()}
    names = {param: name for name, param in engine.model.named_parameters()}
    for param, state in optimizer.state.items():
        for key, value in state.items():
            values[f"{names[param]}.{key}"] = value.clone() if isinstance(value, torch.Tensor) else value
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return values, groups


def assert_same(one, other):
    assert one[0].keys() == other[0].keys()
    for name, value in one[0].items():
        same = (
            torch.equal(value, other[0][name]) if isinstance(value, torch.Tensor) else value == other[0][name]
        )
        assert same, name
    assert one[1] == other[1]


# -- saving --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Rprop])
def test_a01_saving_takes_no_hidden_step(tmp_path, optimizer_class):
    options = {"momentum": 0.9, "dampening": 0.5} if optimizer_class is torch.optim.SGD else {}
    plain, saved = make(optimizer_class, **options), make(optimizer_class, **options)
    calls = []
    saved.optimizers["optimizer"].register_step_post_hook(lambda *_: calls.append(1))
    saved.model.a.weight.grad = gradient = torch.ones_like(saved.model.a.weight)
    before, rng = snapshot(saved), torch.get_rng_state()
    saved.save_dcp(tmp_path / "x")
    fingerprint(saved)
    assert calls == []
    assert saved.model.a.weight.grad is gradient
    assert torch.equal(rng, torch.get_rng_state())
    assert_same(before, snapshot(saved))
    saved.model.a.weight.grad = None
    for engine in (plain, saved):
        train(engine, 0)
    assert_same(snapshot(plain), snapshot(saved))


def test_a26_the_inventory_is_exact_and_the_manifest_names_the_absent(tmp_path):
    trained().save_dcp(tmp_path / "x")
    state = {key for key in keys(tmp_path / "x") if key.startswith("optimizer.state.")}
    stepped = ("a.weight", "a.bias", "b.weight", "b.bias")
    assert state == {f"optimizer.state.{n}.{k}" for n in stepped for k in ("step", "exp_avg", "exp_avg_sq")}
    manifest = read_manifest(tmp_path / "x")
    assert manifest.absent == {"optimizer": ["unused.weight", "unused.bias"]}
    assert manifest.parts == {"scheduler": "replicated"}
    assert manifest.optimizer_classes == {"optimizer": "AdamW"}


def test_the_manifest_holds_the_fingerprint_that_was_asked_for(tmp_path):
    engine = trained()
    save_checkpoint(engine, tmp_path / "x", step=7, fingerprint=True)
    manifest = read_manifest(tmp_path / "x")
    assert manifest.step == 7
    assert manifest.fingerprint == fingerprint(engine).leaves
    assert manifest.fingerprint.keys() == keys(tmp_path / "x")
    assert manifest.files.keys() == {".metadata", "metadata.json", "__0_0.distcp", "__0_0.index.json"}
    before = fingerprint(engine)
    with torch.no_grad():
        engine.model.a.weight.view(-1)[0].nextafter_(torch.tensor(9.0))
    changed = {key for key, leaf in fingerprint(engine).leaves.items() if leaf != before.leaves[key]}
    assert changed == {"model.a.weight"}
    assert fingerprint(engine).total != before.total


def test_a_finished_checkpoint_is_never_written_over(tmp_path):
    trained(1).save_dcp(tmp_path / "x")
    before = {path.name: path.read_bytes() for path in (tmp_path / "x").iterdir()}
    with pytest.raises(CheckpointExists, match="x"):
        trained(2).save_dcp(tmp_path / "x")
    assert {path.name: path.read_bytes() for path in (tmp_path / "x").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a28_replaced_parameters_are_refused_by_name(tmp_path):
    engine = trained()
    engine.model.a.weight = nn.Parameter(torch.zeros(4, 3))
    with pytest.raises(ParameterReplaced, match=r"1 parameter missing in the model") as caught:
        engine.save_dcp(tmp_path / "x")
    assert "shape (4, 3)" in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ParameterReplaced):
        TrainEngine(engine.model, engine.optimizers["optimizer"])


def test_a_part_that_is_not_plain_data_is_refused(tmp_path):
    class Part:
        def state_dict(self):
            return {"fn": print}

    engine = trained()
    engine.parts["odd"] = Part()
    with pytest.raises(CheckpointUnsafe, match=r"odd\['fn'\]"):
        engine.save_dcp(tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


# -- resuming ------------------------------------------------------------------------------------------------


def test_a02_a_parameter_that_never_stepped_resumes_as_one(tmp_path, caplog):
    first = trained()
    first.save_dcp(tmp_path / "x")
    second = make(seed=1, lr=0.3)
    with caplog.at_level(logging.WARNING, logger="orlop"):
        report = second.load_dcp(tmp_path / "x")
    warnings = [record.message for record in caplog.records if record.name == "orlop"]
    assert len(warnings) == 1
    assert warnings[0].startswith("2 parameters have no state")
    assert len(report.of("absent")) == 2
    assert is_fresh(second, second.model.unused.weight)
    for engine in (first, second):  # its first gradient comes now: bias correction with t = 1
        engine.model.unused.weight.grad = torch.ones(2, 2)
        assert engine.step_optimizer(1.0)
    assert_same(snapshot(first), snapshot(second))
    assert second.optimizers["optimizer"].state[second.model.unused.weight]["step"] == 1


def test_a02_loading_into_an_optimizer_that_stepped_resets_the_absent(tmp_path):
    make().save_dcp(tmp_path / "x")
    other = trained()
    other.load_dcp(tmp_path / "x")
    assert all_fresh(other)
    assert_same(snapshot(make()), snapshot(other))


def test_partly_present_state_is_refused_unless_reset_is_allowed(tmp_path):
    engine = trained()
    engine.save_dcp(tmp_path / "x")
    rewrite(tmp_path / "x", lambda flat: flat.pop("optimizer.state.a.weight.exp_avg_sq"), keep_record=False)
    other = trained(1, seed=4)
    before = snapshot(other)
    with pytest.raises(CheckpointMismatch, match=r"partial: optimizer\.state\.a\.weight\.exp_avg_sq"):
        other.load_dcp(tmp_path / "x")
    assert_same(before, snapshot(other))
    report = other.load_dcp(tmp_path / "x", policy=LoadPolicy(reset_damaged=("a.*",)))
    assert [finding.leaf for finding in report.of("reset")] == ["optimizer.state.a.weight"]
    assert is_fresh(other, other.model.a.weight)
    assert torch.equal(
        other.optimizers["optimizer"].state[other.model.a.bias]["exp_avg"],
        engine.optimizers["optimizer"].state[engine.model.a.bias]["exp_avg"],
    )


def test_a08_a_resumed_run_is_bit_equal_to_an_uninterrupted_one(tmp_path):
    whole = trained(6)
    first = trained(3)
    first.save_dcp(tmp_path / "x")
    second = make(seed=9, lr=0.7)
    second.load_dcp(tmp_path / "x")
    for step in range(3, 6):
        train(second, step)
    assert_same(snapshot(whole), snapshot(second))
    assert second.scheduler.state_dict() == whole.scheduler.state_dict()


def test_a08_foreign_keys_of_another_layout_are_an_error(tmp_path):
    engine = trained()
    raw = {"model": engine.model.state_dict(), "optimizer": engine.optimizers["optimizer"].state_dict()}
    dcp.save(raw, checkpoint_id=tmp_path / "x")
    other = make(seed=3, scheduler=False)
    before = snapshot(other)
    with pytest.raises(CheckpointMismatch, match="no parameter name matches"):
        other.load_dcp(tmp_path / "x", load_args=False)
    assert_same(before, snapshot(other))


def test_a09_initial_lr_is_restored_without_a_scheduler(tmp_path):
    first = trained(3)
    first.save_dcp(tmp_path / "x")
    second = make(lr=0.5, scheduler=False)
    second.load_dcp(tmp_path / "x")
    optimizer = second.optimizers["optimizer"]
    assert optimizer.param_groups[0]["initial_lr"] == 1e-2
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5, last_epoch=2)
    assert optimizer.param_groups[0]["lr"] == first.optimizers["optimizer"].param_groups[0]["lr"]
    assert scheduler.last_epoch == 3


def test_a10_hyperparameters_come_from_the_checkpoint_and_load_args_keeps_them(tmp_path):
    trained(scheduler=False, lr=1e-2, betas=(0.8, 0.9)).save_dcp(tmp_path / "x")
    second = make(lr=0.5, scheduler=False, seed=2)
    group = second.optimizers["optimizer"].param_groups[0]
    second.load_dcp(tmp_path / "x", load_args=False)
    assert (group["lr"], group["betas"]) == (0.5, (0.9, 0.999))
    report = second.load_dcp(tmp_path / "x")
    assert (group["lr"], group["betas"]) == (1e-2, (0.8, 0.9))
    assert second.optimizers["optimizer"].param_groups[0] is group
    assert {(d.key, d.live, d.saved) for d in report.differences} == {
        ("lr", "0.5", "0.01"),
        ("betas", "(0.9, 0.999)", "(0.8, 0.9)"),
    }
    assert "lr: 0.5 -> 0.01" in str(report)


@pytest.mark.parametrize(
    "optimizer_class, options",
    [
        (torch.optim.Adadelta, {}),
        (torch.optim.Adafactor, {}),
        (torch.optim.Adagrad, {"initial_accumulator_value": 0.5}),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.Adamax, {}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.ASGD, {}),
        (torch.optim.NAdam, {}),
        (torch.optim.RAdam, {}),
        (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
        (torch.optim.Rprop, {}),
        (torch.optim.SGD, {}),
        (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
    ],
)
def test_every_class_goes_on_as_if_uninterrupted_and_resets_as_if_new(tmp_path, optimizer_class, options):
    whole = trained(4, optimizer_class=optimizer_class, **options)
    trained(2, optimizer_class=optimizer_class, **options).save_dcp(tmp_path / "x")
    second = trained(1, optimizer_class=optimizer_class, seed=9, **options)
    second.load_dcp(tmp_path / "x")
    for step in (2, 3):
        train(second, step)
    assert_same(snapshot(whole), snapshot(second))
    # Without states: as a new optimizer on the same weights.
    second.load_dcp(tmp_path / "x", load_states=False, load_args=False)
    second.optimizers["optimizer"].param_groups[0]["lr"] = 1e-2
    new = make(optimizer_class, model=copy.deepcopy(second.model), scheduler=False, **options)
    second.scheduler = None
    for step in (2, 3):
        train(second, step)
        train(new, step)
    for one, other in zip(second.model.parameters(), new.model.parameters()):
        assert torch.equal(one, other)


def test_a05_stateless_sgd_has_no_state_before_and_after(tmp_path, caplog):
    trained(optimizer_class=torch.optim.SGD).save_dcp(tmp_path / "x")
    assert not any(".state." in key for key in keys(tmp_path / "x"))
    second = make(torch.optim.SGD, seed=3)
    report = second.load_dcp(tmp_path / "x")
    assert second.optimizers["optimizer"].state_dict()["state"] == {}
    assert report.of("absent") == []


def test_load_args_off_keeps_the_schedules_learning_rates_but_not_its_position(tmp_path):
    trained(5).save_dcp(tmp_path / "x")
    second = make(lr=0.5, seed=2)
    second.load_dcp(tmp_path / "x", load_args=False)
    assert second.scheduler.last_epoch == 5
    assert second.scheduler.base_lrs == [0.5]
    assert second.scheduler.get_last_lr() == [0.5]
    assert second.optimizers["optimizer"].param_groups[0]["lr"] == 0.5
    train(second, 5)  # the sixth step halves it
    assert second.optimizers["optimizer"].param_groups[0]["lr"] == 0.25


def test_a_part_can_be_skipped_and_a_missing_one_is_a_fault(tmp_path):
    trained(5, scheduler=False).save_dcp(tmp_path / "x")
    second = make(seed=2)
    before = snapshot(second)
    with pytest.raises(CheckpointMismatch, match="missing part: scheduler"):
        second.load_dcp(tmp_path / "x")
    assert_same(before, snapshot(second))
    second.load_dcp(tmp_path / "x", policy=LoadPolicy(skip_parts=frozenset({"scheduler"})))
    assert second.scheduler.last_epoch == 0


def test_load_states_off_gives_every_parameter_a_fresh_state_and_reads_none(tmp_path):
    trained().save_dcp(tmp_path / "x")
    other = trained(3, seed=5)

    class NoState(FileSystemReader):
        def read_data(self, plan, planner):
            assert not any(".state." in item.dest_index.fqn for item in plan.items)
            return super().read_data(plan, planner)

    reader = NoState(tmp_path / "x")
    other.load_dcp(tmp_path / "x", load_states=False, load_args=False, storage_reader=reader)
    assert all_fresh(other)
    assert torch.equal(other.model.a.weight, trained().model.a.weight)


def two_groups(order, lrs, betas=(0.9, 0.999)):
    torch.manual_seed(0)
    model = Net(width=3)
    layers = {"a": model.a, "b": model.b, "unused": model.unused}
    groups = [
        {"params": [p for n in names for p in layers[n].parameters()], "lr": lr}
        for names, lr in zip(order, lrs)
    ]
    optimizer = of_kind(torch.optim.AdamW)(groups, betas=betas)
    return TrainEngine(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))


def test_a11_groups_are_matched_by_name_and_the_scheduler_follows(tmp_path):
    first = two_groups((["a"], ["b", "unused"]), (1e-2, 1e-3))
    for step in range(2):
        train(first, step)
    first.save_dcp(tmp_path / "x")
    second = two_groups((["unused", "b"], ["a"]), (0.5, 0.6))
    second.load_dcp(tmp_path / "x")
    for engine in (first, second):
        train(engine, 2)
    assert [group["lr"] for group in second.optimizers["optimizer"].param_groups] == [1e-3 / 8, 1e-2 / 8]
    assert second.scheduler.base_lrs == [1e-3, 1e-2]
    assert torch.equal(first.model.a.weight, second.model.a.weight)
    assert torch.equal(first.model.b.weight, second.model.b.weight)


def test_a11_groups_that_do_not_match_are_refused_with_both_sides(tmp_path):
    first = two_groups((["a"], ["b", "unused"]), (1e-2, 1e-3))
    first.save_dcp(tmp_path / "x")
    second = two_groups((["a", "b"], ["unused"]), (0.5, 0.6))
    train(second, 0)
    before = snapshot(second)
    with pytest.raises(CheckpointMismatch, match="param groups do not match") as caught:
        second.load_dcp(tmp_path / "x")
    assert "group 1: 4 parameters: b.weight" in caught.value.found
    assert_same(before, snapshot(second))
    second.load_dcp(tmp_path / "x", load_args=False)
    assert [group["lr"] for group in second.optimizers["optimizer"].param_groups] == [
        g["lr"] for g in before[1]
    ]


def test_a15_custom_group_values_and_tensor_lr_are_filled_in_place(tmp_path):
    first = trained(optimizer_class=torch.optim.SGD, scheduler=False, lr=torch.tensor(0.125), momentum=0.9)
    first.optimizers["optimizer"].param_groups[0]["counter"] = 58
    first.save_dcp(tmp_path / "x")
    lr = torch.tensor(0.75)
    second = trained(1, optimizer_class=torch.optim.SGD, scheduler=False, lr=lr, momentum=0.1)
    state = second.optimizers["optimizer"].state
    pointers = {param: entry["momentum_buffer"].data_ptr() for param, entry in state.items()}
    second.load_dcp(tmp_path / "x")
    group = second.optimizers["optimizer"].param_groups[0]
    assert group["lr"] is lr
    assert (lr.item(), group["momentum"], group["counter"]) == (0.125, 0.9, 58)
    assert {param: entry["momentum_buffer"].data_ptr() for param, entry in state.items()} == pointers
    assert_same(snapshot(first), snapshot(second))


def test_a16_moments_keep_their_dtype_and_widening_is_reported(tmp_path):
    first = trained()
    first.save_dcp(tmp_path / "x")
    second = make()
    second.model.to(torch.float64)
    report = second.load_dcp(tmp_path / "x")
    assert "model.a.weight" in {finding.leaf for finding in report.of("widened")}
    third = make(model=Net().to(torch.bfloat16), seed=3)
    before = snapshot(third)
    with pytest.raises(CheckpointMismatch, match=r"dtype: model\.a\.weight \(expected torch.bfloat16"):
        third.load_dcp(tmp_path / "x")
    assert_same(before, snapshot(third))
    report = third.load_dcp(tmp_path / "x", policy=LoadPolicy(cast_dtypes=True))
    assert torch.equal(third.model.a.weight, first.model.a.weight.to(torch.bfloat16))


def tied(names):
    torch.manual_seed(0)
    shared = nn.Parameter(torch.randn(3, 3))
    model = nn.ModuleDict({name: nn.Linear(3, 3, bias=False) for name in names})
    for layer in model.values():
        layer.weight = shared
    model.forward = lambda x: model["b"](torch.tanh(model["a"](x)))
    return make(model=model, scheduler=False)


def test_a20_a_tied_weight_has_one_state_whichever_name_comes_first(tmp_path):
    first = tied(["a", "b"])
    for step in range(2):
        train(first, step)
    first.save_dcp(tmp_path / "x")
    assert "optimizer.state.b.weight.step" not in keys(tmp_path / "x")
    for names in (["a", "b"], ["b", "a"]):
        second = tied(names)
        second.load_dcp(tmp_path / "x")
        weight = second.model["a"].weight
        assert second.model["b"].weight is weight
        (state,) = second.optimizers["optimizer"].state.values()
        (expected,) = first.optimizers["optimizer"].state.values()
        assert state["step"] == 2
        assert torch.equal(state["exp_avg"], expected["exp_avg"])
        assert torch.equal(weight, first.model["a"].weight)


def test_a22_implementation_flags_stay_the_live_runs(tmp_path):
    trained(fused=True).save_dcp(tmp_path / "x")
    second = make(foreach=True)
    second.load_dcp(tmp_path / "x")
    group = second.optimizers["optimizer"].param_groups[0]
    assert (group["foreach"], group["fused"]) == (True, None)
    train(second, 2)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: torch.compile(model, backend="eager"),
        checkpoint_wrapper,
        lambda model: checkpoint_wrapper(torch.compile(model, backend="eager")),
    ],
)
def test_a30_wrapped_and_plain_runs_load_each_other(tmp_path, wrap):
    def build(wrapped, seed):
        torch.manual_seed(seed)
        net = Net()
        if wrapped:
            net.a = wrap(net.a)
        return make(model=wrap(net) if wrapped else net, seed=seed)

    for name, source, target in (("x", True, False), ("y", False, True)):
        first = build(source, 0)
        for step in range(2):
            train(first, step)
        first.save_dcp(tmp_path / name)
        assert "model.a.weight" in keys(tmp_path / name)
        second = build(target, 7)
        second.load_dcp(tmp_path / name)
        assert fingerprint(first).total == fingerprint(second).total
        assert train(first, 2) == train(second, 2)


# -- what is refused or allowed ------------------------------------------------------------------------------


def test_missing_and_unexpected_model_keys_are_all_listed(tmp_path):
    trained().save_dcp(tmp_path / "x")

    def change(flat):
        flat["model.c.weight"] = flat.pop("model.a.weight")

    rewrite(tmp_path / "x", change, keep_record=False)
    other = make(seed=3)
    before = snapshot(other)
    with pytest.raises(CheckpointMismatch) as caught:
        other.load_dcp(tmp_path / "x")
    assert "missing: model.a.weight" in str(caught.value)
    assert "unexpected: model.c.weight" in str(caught.value)
    assert_same(before, snapshot(other))
    report = other.load_dcp(tmp_path / "x", policy=LoadPolicy(allow_missing=True, allow_unexpected=True))
    assert [finding.leaf for finding in report.of("kept")] == ["model.a.weight"]
    assert [finding.leaf for finding in report.of("ignored")] == ["model.c.weight"]
    assert torch.equal(other.model.a.weight, before[0]["a.weight"])


def test_a27_shapes_are_checked_leaf_by_leaf(tmp_path):
    trained().save_dcp(tmp_path / "x")
    rewrite(
        tmp_path / "x",
        lambda flat: flat.update({"optimizer.state.b.bias.exp_avg": torch.zeros(3)}),
        keep_record=False,
    )
    other = make(seed=3)
    before = snapshot(other)
    with pytest.raises(
        CheckpointMismatch, match=r"shape: optimizer\.state\.b\.bias\.exp_avg \(expected \(2,\)"
    ):
        other.load_dcp(tmp_path / "x")
    assert_same(before, snapshot(other))


def test_a_region_that_no_file_holds_is_incomplete(tmp_path):
    trained().save_dcp(tmp_path / "x")

    class Holed(FileSystemReader):
        def read_metadata(self, *args, **kwargs):
            metadata = super().read_metadata(*args, **kwargs)
            metadata.state_dict_metadata["model.a.weight"].chunks[0].sizes = torch.Size([2, 3])
            return metadata

    other = make(seed=3)
    before = snapshot(other)
    with pytest.raises(CheckpointIncomplete, match=r"model\.a\.weight \(files hold 6 of its 12 elements"):
        other.load_dcp(tmp_path / "x", storage_reader=Holed(tmp_path / "x"))
    assert_same(before, snapshot(other))


def test_a_byte_leaf_that_runs_code_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return (shutil.rmtree, (str(tmp_path / "victim"),))

    (tmp_path / "victim").mkdir()
    trained().save_dcp(tmp_path / "x")
    rewrite(tmp_path / "x", lambda flat: flat.update(scheduler=Evil()), keep_record=False)
    other = make(seed=3)
    before = snapshot(other)
    with pytest.raises(CheckpointUnsafe) as caught:
        other.load_dcp(tmp_path / "x")
    assert caught.value.where == f"scheduler in {tmp_path / 'x' / '__0_0.distcp'}"
    assert (tmp_path / "victim").exists()
    assert_same(before, snapshot(other))


def test_no_checkpoint_is_not_found_and_half_of_one_is_incomplete(tmp_path):
    with pytest.raises(CheckpointNotFound, match="there is no such directory"):
        make().load_dcp(tmp_path / "x")
    (tmp_path / "x").mkdir()
    with pytest.raises(CheckpointNotFound, match="there is no checkpoint in this directory"):
        make().load_dcp(tmp_path / "x")
    (tmp_path / "x" / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(CheckpointIncomplete, match=r"\.metadata is missing"):
        make().load_dcp(tmp_path / "x")
    (tmp_path / "x" / ".metadata").write_bytes(b"")
    with pytest.raises(CheckpointCorrupt, match=r"\.metadata.* can't be read"):
        make().load_dcp(tmp_path / "x")


def test_a_path_that_is_no_checkpoint_is_told_what_it_is_and_what_to_give(tmp_path):
    run, file = tmp_path / "run", tmp_path / "model.pt"
    engine = trained()
    CheckpointStore(run).save(engine, 5)
    CheckpointStore(run).save(engine, 6)
    torch.save(engine.model.state_dict(), file)
    before = snapshot(engine)
    for path, what, found, todo in (
        (run / "stpe-5", "there is no such directory", f"{run}, which holds step-00000005", "a checkpoint"),
        (
            run,
            "this is a run's directory, not one checkpoint",
            "steps 6, 5",
            f"such as {run / 'step-00000006'}",
        ),
        (
            file,
            "this is a file, not a directory",
            None,
            "reads directories that torch.distributed.checkpoint",
        ),
        (tmp_path, "there is no checkpoint in this directory", "model.pt, run", f"{run / 'step-00000005'}"),
    ):
        with pytest.raises(CheckpointNotFound, match=what) as caught:
            engine.load_dcp(path)
        assert caught.value.where == str(path)
        assert caught.value.found is None if found is None else found in caught.value.found
        assert todo in caught.value.todo
        assert_same(snapshot(engine), before)


def test_a_path_under_a_file_is_refused_with_the_file_and_what_to_do(tmp_path):
    (tmp_path / "file").write_text("mine")
    engine = trained()
    for save in (
        lambda: engine.save_dcp(tmp_path / "file" / "x"),
        lambda: CheckpointStore(tmp_path / "file").save(engine, 1),
        lambda: CheckpointStore(tmp_path / "file").resume(engine),
        lambda: Trainer(engine, tmp_path / "file", [1], total_steps=1, save_every=1).run(),
    ):
        with pytest.raises(StorageRefused) as caught:
            save()
        assert str(tmp_path / "file") in caught.value.where
        assert "give another one" in caught.value.todo
        assert ".py" not in str(caught.value)
    assert (tmp_path / "file").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_missing_and_truncated_data_files_are_told_apart(tmp_path):
    trained().save_dcp(tmp_path / "x")
    (data,) = (tmp_path / "x").glob("*.distcp")
    whole = data.read_bytes()
    other = make(seed=3)
    before = snapshot(other)
    data.write_bytes(whole[: len(whole) // 3])
    with pytest.raises(CheckpointCorrupt, match="size that was written"):
        other.load_dcp(tmp_path / "x")
    data.unlink()
    with pytest.raises(CheckpointIncomplete, match="data file is missing") as caught:
        other.load_dcp(tmp_path / "x")
    assert data.name in caught.value.where
    assert_same(before, snapshot(other))


def test_weights_only_are_loaded_with_a_warning(tmp_path, caplog):
    first = trained()
    dcp.save({"model": first.model.state_dict()}, checkpoint_id=tmp_path / "x")
    other = trained(1, seed=3)
    lr = other.optimizers["optimizer"].param_groups[0]["lr"]
    report = other.load_dcp(tmp_path / "x")
    assert "weights only" in str(report)
    assert "optimizer.state" in caplog.text
    assert torch.equal(other.model.a.weight, first.model.a.weight)
    assert all_fresh(other)
    assert other.optimizers["optimizer"].param_groups[0]["lr"] == lr


def test_frozen_parameters_can_be_left_out(tmp_path):
    def build(seed):
        torch.manual_seed(seed)
        net = Net()
        net.a.requires_grad_(False)
        return make(model=net, seed=seed)

    first = build(0)
    train(first, 0)
    first.save_dcp(tmp_path / "x", include_frozen=False)
    assert not {key for key in keys(tmp_path / "x") if key.startswith("model.a.")}
    second = build(1)
    base = second.model.a.weight.clone()
    report = second.load_dcp(tmp_path / "x")
    assert [finding.leaf for finding in report.of("left out")] == ["model.a.weight", "model.a.bias"]
    assert [finding.leaf for finding in report.of("absent")] == [
        "optimizer.state.unused.weight",
        "optimizer.state.unused.bias",
    ]
    assert torch.equal(second.model.a.weight, base)
    assert torch.equal(second.model.b.weight, first.model.b.weight)


def test_a_key_prefix_round_trips_and_plain_dcp_sees_it(tmp_path):
    first = trained()
    first.save_dcp(tmp_path / "x", key_prefix="run.")
    assert all(key.startswith("run.") for key in keys(tmp_path / "x"))
    second = make(seed=3)
    second.load_dcp(tmp_path / "x", key_prefix="run.")
    assert_same(snapshot(first), snapshot(second))


def test_a_storage_writer_of_ones_own_is_used_as_it_is(tmp_path):
    first = trained()
    first.save_dcp("unused", storage_writer=FileSystemWriter(tmp_path / "x"))
    assert not (tmp_path / "x" / "orlop.json").exists()
    second = make(seed=3)
    second.load_dcp("unused", storage_reader=FileSystemReader(tmp_path / "x"))
    assert_same(snapshot(first), snapshot(second))


def test_the_metadata_is_read_once_by_the_reader_that_then_loads(tmp_path):
    trained().save_dcp(tmp_path / "x")
    reads = []

    class Counting(FileSystemReader):
        def read_metadata(self, *args, **kwargs):
            reads.append(self)
            return super().read_metadata(*args, **kwargs)

    reader = Counting(tmp_path / "x")
    make(seed=3).load_dcp("unused", storage_reader=reader)
    assert reads == [reader]


def test_torchs_own_converter_reads_the_nested_form(tmp_path):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    first = trained()
    first.save_dcp(tmp_path / "x")
    dcp_to_torch_save(tmp_path / "x", tmp_path / "x.pt")
    nested = torch.load(tmp_path / "x.pt", weights_only=True)
    assert torch.equal(nested["model"]["a.weight"], first.model.a.weight)
    state = first.optimizers["optimizer"].state[first.model.a.weight]
    assert torch.equal(nested["optimizer"]["state"]["a.weight"]["exp_avg"], state["exp_avg"])
    assert nested["optimizer"]["param_groups"][0]["params"][0] == "a.weight"
    assert nested["scheduler"]["last_epoch"] == 2


# -- hooks and extra state -----------------------------------------------------------------------------------


class Extra(Net):
    def __init__(self):
        super().__init__()
        self.extra = {"scale": 1}
        self.loaded = []
        self.register_load_state_dict_post_hook(
            lambda module, incompatible: module.loaded.append(incompatible)
        )

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


def test_extra_state_is_set_and_post_hooks_fire(tmp_path):
    first = make(model=Extra())
    first.model.extra = {"scale": 5}
    first.save_dcp(tmp_path / "x")
    second = make(model=Extra())
    pointer = second.model.a.weight.data_ptr()
    second.load_dcp(tmp_path / "x")
    assert second.model.extra == {"scale": 5}
    assert len(second.model.loaded) == 1
    assert second.model.a.weight.data_ptr() == pointer


@pytest.mark.parametrize("live", [None, torch.empty(0, dtype=torch.uint8), torch.zeros(2)], ids=str)
def test_extra_state_that_is_a_tensor_is_handed_over_whatever_its_shape(tmp_path, live):
    first = make(model=Extra())
    first.model.extra = torch.arange(5, dtype=torch.uint8)
    first.save_dcp(tmp_path / "x")
    second = make(model=Extra())
    second.model.extra = live
    second.load_dcp(tmp_path / "x")
    assert torch.equal(second.model.extra, first.model.extra)
    assert second.model.extra is not live


class Renamed(Net):
    """Reads checkpoints of an older version, in which `a` was called `old`."""

    def __init__(self):
        super().__init__()
        self.register_load_state_dict_pre_hook(self._rename)

    @staticmethod
    def _rename(module, state, prefix, *args):
        for key in [key for key in state if key.startswith(f"{prefix}old.")]:
            state[key.replace("old.", "a.", 1)] = state.pop(key)


def test_a_model_with_load_hooks_is_loaded_through_its_own_load_state_dict(tmp_path):
    first = trained()
    first.save_dcp(tmp_path / "x", save_optimizer=False)

    def change(flat):
        for name in ("weight", "bias"):
            flat[f"model.old.{name}"] = flat.pop(f"model.a.{name}")

    rewrite(tmp_path / "x", change, keep_record=False)
    second = make(model=Renamed(), seed=3)
    report = second.load_dcp(tmp_path / "x")
    assert torch.equal(second.model.a.weight, first.model.a.weight)
    assert "pre-hook" in report.of("through")[0].detail


def test_an_optimizer_with_load_hooks_is_loaded_through_its_own_load_state_dict(tmp_path):
    first = trained()
    first.save_dcp(tmp_path / "x")
    second = make(seed=3)
    calls = []
    optimizer = second.optimizers["optimizer"]
    optimizer.register_load_state_dict_pre_hook(lambda _, state: calls.append(len(state["state"])))
    report = second.load_dcp(tmp_path / "x")
    assert calls == [4]
    assert "optimizer" in {finding.leaf for finding in report.of("through")}
    assert_same(snapshot(first), snapshot(second))


def test_a_lazy_model_is_neither_saved_nor_loaded_before_its_first_forward(tmp_path):
    model = torch.nn.Sequential(torch.nn.LazyLinear(3))
    engine = TrainEngine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for act in (lambda: engine.save_dcp(tmp_path / "x"), lambda: engine.load_dcp(tmp_path / "y")):
        make().save_dcp(tmp_path / "y") if not (tmp_path / "y").exists() else None
        with pytest.raises(CheckpointMismatch, match=r"run the model forward once") as caught:
            act()
        assert "model.0.weight" in caught.value.where
    assert not (tmp_path / "x").exists()
