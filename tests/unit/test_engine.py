"""The training step: accumulation, the norm, skipped steps, moving state."""

import copy
import gc
import pickle
import random
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader

import orlop
from orlop import SwapAdamW
from orlop.engine import TrainEngine
from orlop.errors import RankFailed, StateNotReady


def make(optimizer_class=torch.optim.AdamW, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    return TrainEngine(model, optimizer_class(model.parameters(), lr=1e-2), **options)


def loss_fn(model, batch):
    return model(batch).square().mean()


BATCH = torch.arange(12.0).reshape(4, 3) / 10


def test_accumulated_gradients_are_those_of_the_mean_loss():
    whole, parts = make(), make()
    loss = whole.train_step([BATCH], loss_fn)
    mean = parts.train_step(iter([BATCH[:2], BATCH[2:]]), loss_fn)
    assert mean == pytest.approx(loss, rel=1e-6)
    assert isinstance(mean, float)
    for one, other in zip(whole.model.parameters(), parts.model.parameters()):
        torch.testing.assert_close(one.grad, other.grad)
    with pytest.raises(ValueError, match="at least one batch"):
        parts.train_step([], loss_fn)


def test_the_norm_and_the_clipped_gradients_are_torchs():
    ours, theirs = make(max_grad_norm=0.01), make()
    for engine in (ours, theirs):
        engine.train_step([BATCH], loss_fn)
    expected = torch.nn.utils.clip_grad_norm_(theirs.model.parameters(), 0.01)
    norm = ours.clip_grad_norm()
    assert (norm.dtype, norm.ndim, norm.device.type) == (torch.float32, 0, "cpu")
    assert torch.equal(norm, expected)
    for one, other in zip(ours.model.parameters(), theirs.model.parameters()):
        assert torch.equal(one.grad, other.grad)


def test_measuring_alone_changes_no_gradient():
    engine = make()
    engine.train_step([BATCH], loss_fn)
    before = [param.grad.clone() for param in engine.model.parameters()]
    engine.clip_grad_norm()
    assert all(torch.equal(a, b.grad) for a, b in zip(before, engine.model.parameters()))
    for param in engine.model.parameters():
        param.grad = None
    assert engine.clip_grad_norm() == 0


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, SwapAdamW])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 6.0])
def test_a_bad_norm_skips_the_step_and_drops_the_gradients(optimizer_class, bad):
    engine = make(optimizer_class, skip_grad_norm_threshold=5.0, max_grad_norm=1.0)
    engine.train_step([BATCH], loss_fn)
    assert engine.step_optimizer(engine.clip_grad_norm())
    (optimizer,) = engine.optimizers.values()
    weights = [param.clone() for param in engine.model.parameters()]
    moments = [v.clone() for state in optimizer.state.values() for v in state.values()]
    engine.train_step([BATCH], loss_fn)
    next(engine.model.parameters()).grad.view(-1)[0] = bad
    norm = engine.clip_grad_norm()
    assert not engine.step_optimizer(norm)
    assert all(param.grad is None for param in engine.model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(weights, engine.model.parameters()))
    after = [v for state in optimizer.state.values() for v in state.values()]
    assert all(torch.equal(a, b) for a, b in zip(moments, after))


def test_a_half_loaded_engine_refuses_to_step_and_keeps_the_gradients():
    engine = make(SwapAdamW)
    engine.train_step([BATCH], loss_fn)
    engine.invalidate("a load failed half-way")
    with pytest.raises(StateNotReady, match="a load failed half-way"):
        engine.step_optimizer(1.0)
    assert all(param.grad is not None for param in engine.model.parameters())
    with pytest.raises(StateNotReady):
        engine.optimizers["optimizer"].step()


def test_stock_state_moves_and_its_counters_stay():
    engine = make()
    assert not engine.put_optimizer_to_device("meta")
    engine.train_step([BATCH], loss_fn)
    assert engine.step_optimizer(1.0)
    assert engine.put_optimizer_to_device("meta")
    (optimizer,) = engine.optimizers.values()
    for state in optimizer.state.values():
        assert {key: value.device.type for key, value in state.items()} == {
            "step": "cpu",
            "exp_avg": "meta",
            "exp_avg_sq": "meta",
        }
    assert not engine.put_optimizer_to_device("meta")
    assert not make(SwapAdamW).put_optimizer_to_device("meta")


def test_a_model_that_is_there_does_not_move():
    assert not make().put_model_to_device("cpu")


def test_several_optimizers_are_saved_and_loaded_by_name(tmp_path):
    def build(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        return TrainEngine(
            model,
            {
                "adam": torch.optim.AdamW(model[0].parameters(), lr=seed + 1e-2),
                "sgd": SwapAdamW(model[1].parameters(), lr=seed + 1e-3),
            },
        )

    first, second = build(0), build(1)
    first.train_step([BATCH], loss_fn)
    assert first.step_optimizer(first.clip_grad_norm())
    first.save_dcp(tmp_path / "x")
    second.load_dcp(tmp_path / "x")
    for name in ("adam", "sgd"):
        one, other = first.optimizers[name], second.optimizers[name]
        assert one.param_groups[0]["lr"] == other.param_groups[0]["lr"]
        for a, b in zip(one.state.values(), other.state.values()):
            assert all(torch.equal(a[key], b[key]) for key in a)


def test_names_that_are_taken_are_refused():
    with pytest.raises(ValueError, match="'model'"):
        make(parts={"model": object()})


def test_b13_a_grad_scaler_is_a_part_like_any_other(tmp_path):
    first = make(parts={"scaler": torch.amp.GradScaler("cpu", init_scale=16.0)})
    scaler = first.parts["scaler"]
    scaler.scale(torch.ones(()))
    scaler.update(8.0)
    first.save_dcp(tmp_path / "x")
    second = make(parts={"scaler": torch.amp.GradScaler("cpu")})
    second.load_dcp(tmp_path / "x")
    assert second.parts["scaler"].state_dict() == scaler.state_dict()
    assert second.parts["scaler"].get_scale() == 8.0


def test_wrong_arguments_are_said_at_once():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    other = torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())
    with pytest.raises(TypeError, match="the first argument is the model"):
        TrainEngine(optimizer, model)
    with pytest.raises(TypeError, match="AdamW itself"):
        TrainEngine(model, torch.optim.AdamW)
    with pytest.raises(ValueError, match="another optimizer"):
        TrainEngine(model, optimizer, torch.optim.lr_scheduler.StepLR(other, 1))
    for options in ({"scheduler": "cosine"}, {"parts": {"x": 3}}):
        with pytest.raises(TypeError, match=r"can't be saved: (str|int) has no state_dict"):
            TrainEngine(model, optimizer, **options)
    with pytest.raises(TypeError, match="parts must be a mapping: parts by name; it is of type list"):
        TrainEngine(model, optimizer, parts=[orlop.RngState()])
    with pytest.raises(ValueError, match="optimizer_layout"):
        TrainEngine(model, optimizer).save_dcp("nowhere", optimizer_layout="flat")


@pytest.mark.parametrize("name", ["max_grad_norm", "skip_grad_norm_threshold"])
@pytest.mark.parametrize(
    "value, kind",
    [("1", TypeError), (True, TypeError), (torch.ones(()), TypeError)]
    + [(value, ValueError) for value in (-1, 0, float("nan"), float("inf"))],
)
def test_a_norm_that_is_no_finite_number_above_zero_is_refused(name, value, kind):
    with pytest.raises(kind, match=f"{name} must be a finite number above 0, or None; it is"):
        make(**{name: value})


LABELS = torch.tensor([0, 1, 0, 1])


@pytest.mark.parametrize(
    "batches, said",
    [
        (BATCH, "of type Tensor"),
        ({"x": BATCH}, "of type dict"),
        ((BATCH, LABELS), r"one batch, of tensors \(torch.float32 \(4, 3\), torch.int64 \(4,\)\)"),
        (3, "3"),
    ],
)
def test_one_batch_in_place_of_a_list_of_them_is_named(batches, said):
    engine = make()
    with pytest.raises(TypeError, match=rf"it is {said}: write train_step\(\[batch\], loss_fn\)"):
        engine.train_step(batches, loss_fn)
    assert all(param.grad is None for param in engine.model.parameters())


@pytest.mark.parametrize(
    "function, said",
    [
        (lambda model, batch: model(batch), r"its shape is \(4, 2\)"),
        (lambda model, batch: 1.0, "it is 1.0"),
        (None, "loss_fn must be a function"),
    ],
)
def test_a_loss_that_no_backward_can_start_from_is_named(function, said):
    with pytest.raises(TypeError, match=said):
        make().train_step([BATCH], function)


def test_a_norm_that_is_no_number_is_refused_and_nothing_steps():
    engine = make()
    engine.train_step([BATCH], loss_fn)
    for norm in ("x", None):
        with pytest.raises(TypeError, match="grad_norm must be the norm that clip_grad_norm returned"):
            engine.step_optimizer(norm)
    assert all(param.grad is not None for param in engine.model.parameters())


@pytest.mark.parametrize(
    "call, said",
    [
        (lambda engine: engine.save_dcp(None), "weights_dir must be a path: .*; it is None"),
        (
            lambda engine: engine.save_dcp("x", save_optimizer="no"),
            "save_optimizer must be True or False; it is 'no'",
        ),
        (lambda engine: engine.load_dcp(5), "weights_dir must be a path: .*; it is 5"),
        (
            lambda engine: engine.load_dcp("x", load_states="no"),
            "load_states must be True or False; it is 'no'",
        ),
        (
            lambda engine: engine.load_dcp("x", policy={"allow_missing": True}),
            r"policy must be a LoadPolicy; it is of type dict: write orlop.LoadPolicy\(...\)",
        ),
        (
            lambda engine: orlop.fingerprint(engine.model),
            "engine must be a TrainEngine; it is of type Sequential",
        ),
        (lambda engine: orlop.record(3, engine.model, run="x"), "engine must be a TrainEngine"),
        (
            lambda engine: orlop.record("3", engine, run="x"),
            r"step must be an int; it is '3': write int\(step\)",
        ),
        (lambda engine: orlop.RngState([torch.Generator()]), "generators must be a mapping"),
        (lambda engine: orlop.RngState({"a": random.Random(0)}), "generator 'a' must be a torch.Generator"),
        (
            lambda engine: SwapAdamW(engine.model.parameters(), window_bytes=1e9),
            "window_bytes must be an int; it is 1000000000.0",
        ),
    ],
)
def test_the_doors_say_which_argument_is_wrong(tmp_path, monkeypatch, call, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TypeError, match=said):
        call(make())
    assert not list(tmp_path.iterdir())


# -- stock optimizers after a load that failed half-way ----------------------------------------------------------------


class Breaking(FileSystemReader):
    """Reads some tensors of the state, and then no more."""

    def read_data(self, plan, planner):
        done = super().read_data(plan, planner)
        if any("exp_avg" in item.storage_index.fqn for item in plan.items):
            done.wait()
            raise OSError("disk gone")
        return done


class OwnLoading(torch.optim.AdamW):
    """Restores itself by a `load_state_dict` of its own."""

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)


def half_loaded(tmp_path, optimizer_class=torch.optim.AdamW, engine=None):
    """An engine whose load broke off, and the checkpoint."""
    if not (tmp_path / "x").exists():
        saved = make(optimizer_class)
        saved.train_step([BATCH], loss_fn)
        saved.step_optimizer(1.0)
        saved.save_dcp(tmp_path / "x")
    engine = engine or make(optimizer_class)
    with pytest.raises(RankFailed, match="disk gone"):
        engine.load_dcp("", storage_reader=Breaking(tmp_path / "x"))
    return engine, tmp_path / "x"


def weights(engine):
    return [param.detach().clone() for param in engine.model.parameters()]


def refuses(step, engine):
    before = weights(engine)
    with pytest.raises(StateNotReady, match="failed half-way"):
        step()
    return all(torch.equal(a, b) for a, b in zip(before, weights(engine)))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, SwapAdamW, OwnLoading])
def test_b4_an_optimizers_own_step_is_refused_until_a_load_succeeds(tmp_path, kind):
    engine, path = half_loaded(tmp_path, kind)
    optimizer = engine.optimizers["optimizer"]
    engine.train_step([BATCH], loss_fn)
    assert refuses(optimizer.step, engine)
    engine, _ = half_loaded(tmp_path, kind, engine)
    assert refuses(optimizer.step, engine)
    engine.load_dcp(path)
    engine.train_step([BATCH], loss_fn)
    before = weights(engine)
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(before, weights(engine)))


def test_a_stock_optimizer_carries_no_hook_before_and_after(tmp_path):
    engine = make()
    (optimizer,) = engine.optimizers.values()
    assert not optimizer._optimizer_step_pre_hooks
    engine, path = half_loaded(tmp_path, engine=engine)
    half_loaded(tmp_path, engine=engine)
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    engine.load_dcp(path)
    assert not optimizer._optimizer_step_pre_hooks


def test_all_of_several_optimizers_refuse_and_step_again(tmp_path):
    def several():
        model = make().model
        each = {
            "first": torch.optim.AdamW(model[0].parameters()),
            "second": torch.optim.SGD(model[1].parameters()),
        }
        return TrainEngine(model, each)

    saved = several()
    saved.train_step([BATCH], loss_fn)
    saved.step_optimizer(1.0)
    saved.save_dcp(tmp_path / "x")
    engine, path = half_loaded(tmp_path, engine=several())
    engine.train_step([BATCH], loss_fn)
    assert all(refuses(optimizer.step, engine) for optimizer in engine.optimizers.values())
    engine.load_dcp(path)
    engine.train_step([BATCH], loss_fn)
    for optimizer in engine.optimizers.values():
        optimizer.step()


def test_the_refusal_outlives_its_engine_and_another_engines_load_ends_it(tmp_path):
    engine, path = half_loaded(tmp_path)
    (optimizer,) = engine.optimizers.values()
    gone = weakref.ref(engine)
    other = TrainEngine(engine.model, optimizer)
    del engine
    gc.collect()
    assert gone() is None
    other.train_step([BATCH], loss_fn)
    assert refuses(lambda: other.step_optimizer(1.0), other)
    with pytest.raises(StateNotReady, match="failed half-way"):
        other.save_dcp(tmp_path / "never")
    assert not (tmp_path / "never").exists()
    other.load_dcp(path)
    other.train_step([BATCH], loss_fn)
    assert other.step_optimizer(1.0)


def test_a_half_loaded_optimizer_can_be_collected_and_copied(tmp_path):
    engine, path = half_loaded(tmp_path)
    (optimizer,) = engine.optimizers.values()
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert not copied._optimizer_step_pre_hooks
        copied.step()  # its parameters are copies: nothing of the engine's
    engine.load_dcp(path)
    optimizer.step()
    engine, _ = half_loaded(tmp_path)
    gone = weakref.ref(engine.optimizers["optimizer"])
    del engine, optimizer, copied
    gc.collect()
    assert gone() is None


def test_a_grad_scaler_and_a_scheduler_pass_the_refusal_on(tmp_path):
    engine, path = half_loaded(tmp_path)
    (optimizer,) = engine.optimizers.values()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)

    def step():
        optimizer.zero_grad()
        scaler.scale(loss_fn(engine.model, BATCH)).backward()
        scaler.step(optimizer)

    assert refuses(step, engine)
    assert refuses(optimizer.step, engine)
    scaler.update()
    engine.load_dcp(path)
    before = weights(engine)
    step()
    scaler.update()
    scheduler.step()
    assert not any(torch.equal(a, b) for a, b in zip(before, weights(engine)))
