"""Models that load by their own `load_state_dict`: a verdict for each leaf, nothing changed where one is refused."""

import copy
import functools
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.rewriting import drop, rewrite
from tests.unit.kinds import kind, of_kind  # noqa: F401
from torch import nn

from orlop.checkpoints import CheckpointStore
from orlop.engine import TrainEngine
from orlop.errors import CheckpointMismatch
from orlop.resume import LoadPolicy


class Net(nn.Module):
    """Knows `a` by its old name `old`, too; does something on the side when it is loaded."""

    def __init__(self, *more):
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)
        for name in more:
            self.add_module(name, nn.Linear(2, 2))
        self.register_buffer("seen", torch.zeros(2))
        self.log = []
        self.loads = 0
        self.register_load_state_dict_pre_hook(self._rename)
        self.register_load_state_dict_post_hook(lambda module, keys: module.log.append("loaded"))

    @staticmethod
    def _rename(module, state, prefix, *args):
        module.loads += 1
        module.seen = torch.ones(2)
        for key in [key for key in state if key.startswith(f"{prefix}old.")]:
            state[key.replace("old.", "a.", 1)] = state.pop(key)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def make(*more, model=None, seed=0):
    torch.manual_seed(seed)
    model = Net(*more) if model is None else model
    trains = [param for param in model.parameters() if param.requires_grad]
    return train(TrainEngine(model, of_kind(torch.optim.AdamW)(trains, lr=1e-2)))


def train(engine):
    engine.train_step([torch.ones(5, 3)], lambda model, batch: model(batch).square().mean())
    assert engine.step_optimizer(engine.clip_grad_norm())
    return engine


def snapshot(engine):
    values = {key: copy.deepcopy(value) for key, value in engine.model.state_dict().items()}
    names = {param: name for name, param in engine.model.named_parameters()}
    for optimizer in engine.optimizers.values():
        getattr(optimizer, "synchronize", lambda: None)()
        for param, state in optimizer.state.items():
            values |= {f"{names[param]}.{key}": copy.deepcopy(value) for key, value in state.items()}
    return values


def places(model):
    """Which tensors the model has, and where."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: (id(tensor), tensor.data_ptr()) for name, tensor in tensors.items()}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        same = torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
        assert same, name


def refused(engine, act):
    """The error of a load that must change nothing, and leave the run ready."""
    before, where, attributes = snapshot(engine), places(engine.model), copy.copy(vars(engine.model))
    log = list(getattr(engine.model, "log", []))
    with pytest.raises(CheckpointMismatch) as caught:
        act()
    assert_same(before, snapshot(engine))
    assert places(engine.model) == where
    assert vars(engine.model) == attributes
    assert getattr(engine.model, "log", []) == log
    engine.require_ready()
    return str(caught.value)


def saved(path, change=lambda flat: None, *more, **options):
    """A checkpoint of orlop's, changed, as another program's."""
    engine = make(*more, **options)
    engine.save_dcp(path)
    rewrite(path, change, keep_record=False)
    return engine


def rename(flat, **values):
    """As the older version of the model would have saved it."""
    for name in ("weight", "bias"):
        flat[f"model.old.{name}"] = flat.pop(f"model.a.{name}")
    flat |= {f"model.old.{name}": value for name, value in values.items()}


@pytest.mark.parametrize("renamed", [False, True])
def test_what_fits_is_loaded_into_place(tmp_path, renamed):
    first = saved(tmp_path / "x", rename if renamed else lambda flat: None)
    second = make(seed=3)
    where, hook = places(second.model), len(second.model._load_state_dict_post_hooks)
    report = second.load_dcp(tmp_path / "x")
    assert_same(snapshot(first), snapshot(second))
    assert places(second.model) == where
    assert (second.model.loads, second.model.log) == (1, ["loaded"])
    assert len(second.model._load_state_dict_post_hooks) == hook
    assert {f.leaf for f in report.of("loaded")} >= {f"model.{name}" for name in second.model.state_dict()}
    assert "pre-hook" in report.of("through")[0].detail


@pytest.mark.parametrize("policy", [None, LoadPolicy(allow_missing=True, allow_unexpected=True)])
def test_f03_no_common_name_is_an_error_whatever_the_policy(tmp_path, policy):
    def change(flat):
        for key in [key for key in flat if key.startswith("model.")]:
            flat[key.replace("model.", "model.other.")] = flat.pop(key)

    saved(tmp_path / "x", change)
    engine = make(seed=3)
    text = refused(engine, lambda: engine.load_dcp(tmp_path / "x", policy=policy, load_states=False))
    assert "1 layout" in text
    assert "model.other.a.bias" in text


def test_a_model_whose_hooks_make_up_all_is_not_loaded_from_a_stranger(tmp_path):
    saved(tmp_path / "x", lambda flat: rename(flat))
    model = nn.Sequential(nn.Linear(3, 2))
    model.register_load_state_dict_pre_hook(
        lambda module, state, *_: [state.setdefault(k, v) for k, v in module.state_dict().items()]
    )
    engine = make(model=model)
    policy = LoadPolicy(allow_missing=True, allow_unexpected=True)
    assert "layout" in refused(
        engine, lambda: engine.load_dcp(tmp_path / "x", policy=policy, load_states=False, load_args=False)
    )


@pytest.mark.parametrize("by_store", [False, True])
def test_f03_a_missing_leaf_is_one_mismatch_that_changes_nothing(tmp_path, by_store):
    store = CheckpointStore(tmp_path)
    store.save(make(), 1)
    engine = make("c", seed=3)
    text = refused(
        engine, lambda: store.resume(engine) if by_store else engine.load_dcp(next(tmp_path.glob("*1")))
    )
    assert "missing: model.c.weight" in text
    assert "missing: model.c.bias" in text
    assert "not in its groups: c.weight" in text


def test_f03_each_policy_relaxes_its_own_verdict(tmp_path):
    saved(tmp_path / "more", lambda flat: flat.update({"model.z": torch.ones(1)}))
    saved(tmp_path / "less", lambda flat: flat.pop("model.b.bias"))
    missing, unexpected = LoadPolicy(allow_missing=True), LoadPolicy(allow_unexpected=True)
    engine = make(seed=3)
    for path, policy, fault in (
        ("more", missing, "unexpected: model.z"),
        ("less", unexpected, "missing: model.b.bias"),
    ):
        load = functools.partial(engine.load_dcp, tmp_path / path, policy=policy)
        assert fault in refused(engine, load)
    bias = engine.model.b.bias.clone()
    assert [f.leaf for f in engine.load_dcp(tmp_path / "less", policy=missing).of("kept")] == ["model.b.bias"]
    assert torch.equal(engine.model.b.bias, bias)
    report = engine.load_dcp(tmp_path / "more", policy=unexpected)
    assert [f.leaf for f in report.of("ignored")] == ["model.z"]


def test_f11_a_checkpoint_without_the_frozen_base_resumes_strictly(tmp_path):
    def build(seed):
        torch.manual_seed(seed)
        model = Net()
        model.a.requires_grad_(False)
        return make(model=model, seed=seed)

    first, second = build(0), build(1)
    first.save_dcp(tmp_path / "x", include_frozen=False)
    base = second.model.a.weight.clone()
    report = second.load_dcp(tmp_path / "x")
    assert [f.leaf for f in report.of("left out")] == ["model.a.weight", "model.a.bias"]
    assert torch.equal(second.model.a.weight, base)
    assert torch.equal(second.model.b.weight, first.model.b.weight)
    rewrite(tmp_path / "x", drop(r"model\.b\.bias"))
    assert "missing: model.b.bias" in refused(second, lambda: second.load_dcp(tmp_path / "x"))


@pytest.mark.parametrize("renamed", [False, True])
def test_f04_a_cast_needs_the_policy_under_an_old_name_as_well(tmp_path, renamed):
    def change(flat):
        flat["model.a.weight"] = flat["model.a.weight"].double() + 1e-12
        flat["model.a.bias"] = flat["model.a.bias"].bfloat16()
        if renamed:
            rename(flat)

    saved(tmp_path / "x", change)
    engine = make(seed=3)
    text = refused(engine, lambda: engine.load_dcp(tmp_path / "x"))
    assert "1 dtype" in text
    assert "dtype: model.a.weight (expected torch.float32, found torch.float64" in text
    report = engine.load_dcp(tmp_path / "x", policy=LoadPolicy(cast_dtypes=True))
    assert [f.leaf for f in report.of("cast")] == ["model.a.weight"]
    assert [f.leaf for f in report.of("widened")] == ["model.a.bias"]


@pytest.mark.parametrize("renamed", [False, True])
def test_f04_another_shape_is_found_before_anything_changes(tmp_path, renamed):
    def change(flat):
        flat["model.a.weight"] = torch.ones(7, 3)
        if renamed:
            rename(flat)

    saved(tmp_path / "x", change)
    engine = make(seed=3)
    text = refused(engine, lambda: engine.load_dcp(tmp_path / "x"))
    assert "1 shape" in text
    assert "shape: model.a.weight" in text


class Padded(nn.Linear):
    """Takes weights with fewer rows, as vocabularies do that have grown."""

    def _load_from_state_dict(self, state, prefix, *args):
        weight = state[f"{prefix}weight"]
        lacking = self.out_features - weight.shape[0]
        state[f"{prefix}weight"] = torch.cat([weight, torch.zeros(lacking, self.in_features)])
        super()._load_from_state_dict(state, prefix, *args)


def test_hooks_may_take_another_shape(tmp_path):
    small, large = nn.Sequential(Padded(3, 2, bias=False)), nn.Sequential(Padded(3, 4, bias=False))
    make(model=small).save_dcp(tmp_path / "x", save_optimizer=False)
    engine = make(model=large)
    engine.load_dcp(tmp_path / "x")
    assert torch.equal(large[0].weight[:2], small[0].weight)
    assert not large[0].weight[2:].any()
    # One that fails is told in its own words.
    rewrite(
        tmp_path / "x",
        lambda flat: flat.update({"model.0.old": flat.pop("model.0.weight")}),
        keep_record=False,
    )
    assert "refused: model (KeyError: '0.weight')" in refused(engine, lambda: engine.load_dcp(tmp_path / "x"))


def test_hooks_find_what_was_left_out_of_the_checkpoint(tmp_path):
    def build(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(Padded(3, 3), nn.Linear(3, 3))
        model[0].requires_grad_(False)
        return make(model=model, seed=seed)

    first, second = build(0), build(1)
    first.save_dcp(tmp_path / "x", include_frozen=False)
    base = second.model[0].weight.clone()
    assert len(second.load_dcp(tmp_path / "x").of("left out")) == 2
    assert torch.equal(second.model[0].weight, base)
    assert torch.equal(second.model[1].weight, first.model[1].weight)


@pytest.mark.parametrize("wrap", [torch.compile, lambda model: nn.ModuleDict({"m": torch.compile(model)})])
def test_hooks_below_a_wrapper_find_old_names(tmp_path, wrap):
    def build(seed):
        torch.manual_seed(seed)
        model = wrap(Net())
        return TrainEngine(model, torch.optim.SGD(model.parameters(), lr=0.1))

    first, second = build(0), build(1)
    first.save_dcp(tmp_path / "x", save_optimizer=False)

    def change(flat):
        for key in [key for key in flat if ".a." in key]:
            flat[key.replace(".a.", ".old.")] = flat.pop(key)
        flat["model.more"] = torch.ones(1)

    rewrite(tmp_path / "x", change, keep_record=False)
    report = second.load_dcp(tmp_path / "x", policy=LoadPolicy(allow_unexpected=True))
    assert_same(snapshot(first), snapshot(second))
    assert [f.leaf for f in report.of("ignored")] == ["model.more"]


def test_what_can_not_be_read_is_not_tried(tmp_path):
    saved(tmp_path / "x", lambda flat: flat.update({"model.b.bias": [1, 2]}))
    engine, calls = make("c", seed=3), []
    engine.model.register_load_state_dict_pre_hook(lambda *args: calls.append(1))
    assert "kind: model.b.bias" in refused(engine, lambda: engine.load_dcp(tmp_path / "x"))
    assert not calls


def test_a_load_that_is_interrupted_is_undone(tmp_path):
    saved(tmp_path / "x")
    engine = make(seed=3)

    def interrupt(module, keys):
        raise KeyboardInterrupt

    engine.model.register_load_state_dict_post_hook(interrupt)
    before = snapshot(engine)
    with pytest.raises(KeyboardInterrupt):
        engine.load_dcp(tmp_path / "x")
    assert_same(before, snapshot(engine))
    engine.require_ready()


class Versioned(nn.Linear):
    """An old format had its weight the other way round."""

    _version = 2

    def _load_from_state_dict(self, state, prefix, metadata, *args):
        if metadata.get("version", 1) < 2:
            state[f"{prefix}weight"] = state[f"{prefix}weight"].flip(0)
        super()._load_from_state_dict(state, prefix, metadata, *args)


def test_hooks_are_told_the_live_versions(tmp_path):
    first, second = make(model=Versioned(3, 3)), make(model=Versioned(3, 3), seed=3)
    first.save_dcp(tmp_path / "x")
    second.load_dcp(tmp_path / "x")
    assert torch.equal(first.model.weight, second.model.weight)


class Replaces(nn.Module):
    """Loads by putting other tensors in the places of its own."""

    def __init__(self, wider=False):
        super().__init__()
        self.w, self.wider = nn.Parameter(torch.randn(3, 2)), wider
        self.register_buffer("count", torch.zeros(2))

    def forward(self, x):
        return x @ self.w

    def load_state_dict(self, state):
        self.w = nn.Parameter(state["w"].double() if self.wider else state["w"].clone())
        self.count = state["count"]


def test_what_a_model_replaces_stays_in_its_memory(tmp_path):
    first, second = make(model=Replaces()), make(model=Replaces(), seed=3)
    first.model.count += 2
    first.save_dcp(tmp_path / "x")
    where = places(second.model)
    second.load_dcp(tmp_path / "x")
    assert_same(snapshot(first), snapshot(second))
    assert places(second.model) == where
    third = make(model=Replaces(wider=True), seed=4)
    text = refused(third, lambda: third.load_dcp(tmp_path / "x"))
    assert "replaced the parameter w of Replaces" in text


def test_tied_weights_are_loaded_once_under_any_of_their_names(tmp_path):
    def build(seed):
        torch.manual_seed(seed)
        model = Net("c", "d")
        model.d.weight = model.c.weight
        return make(model=model, seed=seed)

    first, second = build(0), build(1)
    first.save_dcp(tmp_path / "x")
    second.load_dcp(tmp_path / "x")
    assert_same(snapshot(first), snapshot(second))
    assert second.model.d.weight is second.model.c.weight
    rewrite(tmp_path / "x", drop(r"model\.c\.weight"), keep_record=False)
    build(2).load_dcp(tmp_path / "x")
    rewrite(tmp_path / "x", drop(r"model\.d\.weight"), keep_record=False)
    third = build(2)
    assert "missing: model.c.weight" in refused(third, lambda: third.load_dcp(tmp_path / "x"))


class Holder:
    """What a module's attributes don't show."""

    def __init__(self):
        self.value = {"scale": [1], "deep": {"t": torch.zeros(2)}}


class Extra(Net):
    def __init__(self, *more):
        super().__init__(*more)
        self.holder = Holder()

    @property
    def extra(self):
        return self.holder.value

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        # The old one must not be lost although it is changed in place.
        self.extra.clear()
        self.extra.update(state)


def test_extra_state_is_put_back_as_well(tmp_path):
    make(model=Extra()).save_dcp(tmp_path / "x")
    engine = make(model=Extra("c"), seed=3)
    engine.model.extra["scale"] = [5]
    with pytest.raises(CheckpointMismatch, match=r"missing: model\.c\.weight"):
        engine.load_dcp(tmp_path / "x")
    assert engine.model.extra["scale"] == [5]
    assert torch.equal(engine.model.extra["deep"]["t"], torch.zeros(2))
    make(model=Extra("c"), seed=1).save_dcp(tmp_path / "y")
    engine.load_dcp(tmp_path / "y")
    assert engine.model.extra["scale"] == [1]


def test_a_file_that_plain_dcp_wrote_loads_alike(tmp_path):
    first, second = make(model=Extra()), make(model=Extra(), seed=3)
    first.model.extra["scale"] = [7]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": first.model.state_dict()}, checkpoint_id=tmp_path / "x")
    second.load_dcp(tmp_path / "x")
    assert second.model.extra["scale"] == [7]
    assert torch.equal(first.model.a.weight, second.model.a.weight)
