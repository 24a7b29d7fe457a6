"""One rank's fault is one error on all ranks, at once, and before anything live has changed.

Each rank reads a copy of the checkpoint of its own, as if every node had its own disk, so that a fault can be on one
node only.
"""

import os
import shutil
import signal
import time
import traceback
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.futures import Future

import orlop
from orlop.errors import OrlopError, RankFailed
from orlop.testing import run_ranks

pytestmark = pytest.mark.dist

# Far less than any timeout, far more than a busy machine needs to notice.
SECONDS = 20.0


class Counter:
    """A part that differs by rank, and can fail when it is restored."""

    def __init__(self, value):
        self.value = value
        self.broken = False

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        if self.broken:
            raise OSError(5, "the stream is gone")
        self.value = state["value"]


def _engine(rank, swapped=True, seed=0, group=None):
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Module()
    for name, shape in (("matrix", (5, 6)), ("single", (1,)), ("late", (3, 2))):
        value = distribute_tensor(torch.randn(shape), mesh, [Shard(0)])
        model.register_parameter(name, nn.Parameter(value))
    model.register_buffer("calls", torch.full((2,), float(seed)))
    groups = [
        {"params": [model.matrix, model.late], "lr": 0.1 + seed},
        {"params": [model.single], "lr": 0.2 + seed, "weight_decay": 0.0},
    ]
    optimizer = orlop.SwapAdamW(groups) if swapped else torch.optim.AdamW(groups)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    parts = {"counter": Counter(100 * seed + rank)}
    return orlop.TrainEngine(model, optimizer, scheduler, parts, process_group=group)


def _step(engine):
    for name in ("matrix", "single"):
        param = getattr(engine.model, name)
        param.grad = torch.ones_like(param)
    assert engine.step_optimizer(1.0)
    engine.scheduler.step()


def _snapshot(engine):
    """Every live bit of this rank."""
    optimizer = engine.optimizers["optimizer"]
    names = {param: name for name, param in engine.model.named_parameters()}
    tensors = dict(engine.model.state_dict())
    for param, state in optimizer.state.items():
        tensors.update({f"{names[param]}.{key}": value for key, value in state.items()})
    return (
        {name: _bits(value) for name, value in tensors.items()},
        [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups],
        engine.scheduler.state_dict(),
        engine.parts["counter"].value,
    )


def _bits(tensor):
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.detach().contiguous().reshape(-1).view(torch.uint8).tolist()


def _caught(act):
    """The error as the user sees it: its type, its text, the tracebacks that are shown, the seconds until then."""
    start = time.monotonic()
    try:
        act()
    except OrlopError as error:
        shown = "".join(traceback.format_exception(error)).count("Traceback (most recent call last)")
        return type(error).__name__, str(error), shown, time.monotonic() - start
    return "none", "", 0, 0.0


# -- faults of rank 1's node -----------------------------------------------------------------------------------------


def _data_file(folder):
    (file,) = folder.glob("__1_*.distcp")
    return file


def _unlink(rank, folder, engine):
    if rank == 1:
        _data_file(folder).unlink()


def _truncate(rank, folder, engine):
    if rank == 1:
        os.truncate(_data_file(folder), _data_file(folder).stat().st_size // 2)


def _no_metadata(rank, folder, engine):
    if rank == 1:
        (folder / ".metadata").unlink()


def _no_folder(rank, folder, engine):
    if rank == 1:
        shutil.rmtree(folder)


def _other_step(rank, folder, engine):
    """Rank 1's node has the checkpoint of another step, under the same name."""
    if rank == 1:
        shutil.rmtree(folder)
        shutil.copytree("../other", folder)


def _more_parts(rank, folder, engine):
    if rank == 1:
        engine.parts["extra"] = Counter(3)


def _other_shape(rank, folder, engine):
    if rank == 1:
        engine.model.register_buffer("calls", torch.zeros(3))


def _flip(rank, folder, engine):
    if rank == 1:
        file = _data_file(folder)
        content = bytearray(file.read_bytes())
        wanted = bytes(_FLIPPED)
        at = content.find(wanted)
        assert at > 0
        content[at + 5] ^= 4
        file.write_bytes(bytes(content))


_FLIPPED: list[int] = []


def _broken_part(rank, folder, engine):
    engine.parts["counter"].broken = rank == 1


# Fault, the error's type, what its text names besides rank 1.
REFUSED = [
    (_unlink, "CheckpointIncomplete", ["__1_0.distcp"]),
    (_truncate, "CheckpointCorrupt", ["__1_0.distcp"]),
    (_no_metadata, "CheckpointIncomplete", [".metadata", "copy"]),
    (_no_folder, "CheckpointNotFound", ["copy"]),
    (_other_step, "CheckpointMismatch", ["copy", "different checkpoints"]),
    (_more_parts, "CheckpointMismatch", ["missing part: extra"]),
    (_other_shape, "CheckpointMismatch", ["model.calls", "(3,)", "(2,)"]),
]
TORN = [
    (_flip, "CheckpointCorrupt", ["__1_0.distcp"]),
    (_broken_part, "RankFailed", ["the stream is gone", "test_failures.py"]),
]


def _suffer(rank, folder, faults, swapped):
    """Load through each fault; returns each rank's errors and whether the live bits and the readiness stayed."""
    folder = Path(folder)
    first = _engine(rank, swapped)
    _step(first)
    first.save_dcp(folder / "other")
    _step(first)
    first.save_dcp(folder / "saved")
    saved = _snapshot(first)
    _FLIPPED[:] = _bits(first.optimizers["optimizer"].state[first.model.matrix]["exp_avg"])
    found = []
    for fault in faults:
        node = folder / f"node-{rank}"
        node.mkdir(exist_ok=True)
        os.chdir(node)  # the same path on all ranks, and other files
        copy = Path("copy")
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder / "saved", copy)
        engine = _engine(rank, swapped, seed=1)
        _step(engine)
        fault(rank, copy, engine)
        before = _snapshot(engine)
        error = _caught(lambda engine=engine: engine.load_dcp("copy"))
        unchanged = _snapshot(engine) == before
        refusals = [
            _caught(act)[0]
            for act in (lambda e=engine: e.step_optimizer(1.0), lambda e=engine: e.save_dcp(folder / "never"))
        ]
        shutil.rmtree(folder / "never", ignore_errors=True) if rank == 0 else None
        engine = engine if fault not in (_more_parts, _other_shape) else _engine(rank, swapped)
        engine.parts["counter"].broken = False
        engine.load_dcp(folder / "saved")
        assert _snapshot(engine) == saved, fault.__name__
        _step(engine)
        found.append((error, unchanged, refusals))
    return found


def _require_alike(results, faults):
    for (fault, kind, names), first, second in zip(faults, *results):
        (found, text, shown, seconds), other = first[0], second[0]
        story = f"{fault.__name__}: {text}"
        assert (found, text) == other[:2], story
        assert found == kind, story
        assert max(seconds, other[3]) < SECONDS, story
        assert shown == other[2] == 1, story
        for name in ("rank 1", *names):
            assert name in text, story


@pytest.mark.parametrize("swapped", [True, False], ids=["swapped", "stock"])
def test_what_one_rank_cannot_load_is_refused_by_all_and_nothing_changes(tmp_path, swapped):
    faults = [fault for fault, _, _ in REFUSED]
    results = run_ranks(_suffer, 2, str(tmp_path), faults, swapped)
    _require_alike(results, REFUSED)
    for result in results:
        for fault, (_, unchanged, refusals) in zip(faults, result):
            assert unchanged, fault.__name__
            # A save may still be refused for the fault itself: ranks that disagree about a buffer's shape.
            assert refusals in (["none", "none"], ["none", "CheckpointMismatch"]), fault.__name__


@pytest.mark.parametrize("swapped", [True, False], ids=["swapped", "stock"])
def test_a_load_that_fails_half_way_leaves_all_ranks_unready_until_one_succeeds(tmp_path, swapped):
    faults = [fault for fault, _, _ in TORN]
    results = run_ranks(_suffer, 2, str(tmp_path), faults, swapped)
    _require_alike(results, TORN)
    for result in results:
        for _, _, refusals in result:
            assert refusals == ["StateNotReady", "StateNotReady"]


# -- exceptions of a storage backend that can't be sent ----------------------------------------------------------------


class KeywordOnly(Exception):
    """Can be pickled, and not unpickled."""

    def __init__(self, *, code):
        super().__init__(f"code {code}")


def _alien(kind):
    """An exception that no other rank could unpickle; an own one, for comparison."""

    class Local(Exception):
        pass

    return {
        "KeywordOnly": lambda: KeywordOnly(code=5),
        "Holding": lambda: type("Holding", (Exception,), {"__module__": __name__})(lambda: 0),
        "Local": lambda: Local("of this rank alone"),
        "StorageFull": lambda: OSError(28, "No space left on device"),
    }[kind]()


def _later(make_error):
    future = Future()
    future.set_exception(make_error())
    return future


def _failing(backend, stage, act):
    """A backend of which one method fails as `act` says, where this rank is to suffer."""

    def method(self, *args, **kwargs):
        return act(self, args, lambda: getattr(super(Failing, self), stage)(*args, **kwargs))

    Failing = type("Failing", (backend,), {stage: method})
    return Failing


# What fails, and the rank that it fails on: global plans and the end of a save are the coordinator's.
READING = [
    ("read_metadata", 1),
    ("set_up_storage_reader", 1),
    ("prepare_local_plan", 1),
    ("prepare_global_plan", 0),
    ("read_data", 1),
    ("future", 1),
    ("checkpoint_id", 1),
]
WRITING = [
    ("storage_meta", 1),
    ("set_up_storage_writer", 1),
    ("prepare_local_plan", 1),
    ("prepare_global_plan", 0),
    ("write_data", 1),
    ("future", 1),
    ("finish", 0),
]


def _act(stage, guilty, kind, fails):
    def act(self, args, go_on):
        if guilty == dist.get_rank() and fails(args):
            if stage == "future":
                return _later(lambda: _alien(kind))
            raise _alien(kind)
        return go_on()

    return act


def _reader(path, stage, guilty, kind):
    """Fails where the tensors are read, if that can be told."""

    def fails(args):
        plans = args[0] if isinstance(args and args[0], list) else args[:1]
        keys = [item.storage_index.fqn for plan in plans for item in getattr(plan, "items", ())]
        return not keys or any("exp_avg" in key for key in keys)

    act = _act(stage, guilty, kind, fails)
    if stage == "checkpoint_id":
        named = property(lambda self: act(self, (), lambda: path))
        return type("Nameless", (FileSystemReader,), {stage: named})(path)
    return _failing(FileSystemReader, "read_data" if stage == "future" else stage, act)(path)


def _writer(path, stage, guilty, kind):
    act = _act(stage, guilty, kind, lambda args: True)
    return _failing(FileSystemWriter, "write_data" if stage == "future" else stage, act)(path)


def _suffer_backends(rank, folder, kind):
    folder = Path(folder)
    first = _engine(rank, swapped=False)
    _step(first)
    first.save_dcp(folder / "saved")
    saved = _snapshot(first)
    found = []
    engine = _engine(rank, swapped=False, seed=1)
    _step(engine)
    before = _snapshot(engine)
    for stage, guilty in READING:
        reader = _reader(str(folder / "saved"), stage, guilty, kind)
        error = _caught(lambda reader=reader: engine.load_dcp("", storage_reader=reader))
        refused = _caught(lambda: engine.require_ready())[0] == "StateNotReady"
        found.append((stage, guilty, error, refused or _snapshot(engine) == before))
    engine.load_dcp(folder / "saved")
    assert _snapshot(engine) == saved
    for stage, guilty in WRITING:
        writer = _writer(str(folder / f"{stage}"), stage, guilty, kind)
        error = _caught(lambda writer=writer: engine.save_dcp("", storage_writer=writer))
        found.append((stage, guilty, error, _snapshot(engine) == saved))
    engine.save_dcp(folder / "again")
    return found


@pytest.mark.parametrize("kind", ["KeywordOnly", "Holding", "Local", "StorageFull"])
def test_an_exception_that_no_rank_could_unpickle_ends_all_of_them_and_is_said(tmp_path, kind):
    results = run_ranks(_suffer_backends, 2, str(tmp_path), kind, timeout_seconds=60)
    assert len(results[0]) == len(READING) + len(WRITING)
    for (stage, guilty, first, sound), (_, _, second, also_sound) in zip(*results):
        story = f"{stage}: {first}, {second}"
        assert first[:3] == second[:3], story
        assert first[0] == ("StorageFull" if kind == "StorageFull" else "RankFailed"), story
        assert f"where: rank {guilty}" in first[1], story
        assert ("No space left" if kind == "StorageFull" else f"found: {kind}: ") in first[1], story
        assert max(first[3], second[3]) < SECONDS, story
        assert sound, story
        assert also_sound, story


# -- paths of each rank's own ------------------------------------------------------------------------------------------


def _load_each_its_own(rank, folder):
    folder = Path(folder)
    first = _engine(rank)
    _step(first)
    first.save_dcp(folder / "0")
    _step(first)
    first.save_dcp(folder / "other")
    if rank == 0:
        shutil.copytree(folder / "0", folder / "1")
    dist.barrier()
    engine = _engine(rank, seed=1)
    before = _snapshot(engine)
    engine.parts["extra"] = Counter(3)
    unfit = _caught(lambda: engine.load_dcp(folder / str(rank)))[:2]
    del engine.parts["extra"]
    differ = _caught(lambda: engine.load_dcp(folder / ("0" if rank == 0 else "other")))[:2]
    assert _snapshot(engine) == before
    engine.load_dcp(folder / str(rank))
    return unfit, differ


def test_c2_ranks_with_paths_of_their_own_get_one_text_and_it_is_true(tmp_path):
    first, second = run_ranks(_load_each_its_own, 2, str(tmp_path))
    assert first == second
    (unfit, text), (differ, other) = first
    assert (unfit, differ) == ("CheckpointMismatch", "CheckpointMismatch")
    assert "missing part: extra" in text
    assert f"where: {tmp_path / '0'}" in text
    assert "ranks see different checkpoints" in other
    assert f"where: rank 1: {tmp_path / 'other'}" in other
    assert f", in {tmp_path / '0'}" in other


# -- ranks that die or hang ------------------------------------------------------------------------------------------


class Lethal(FileSystemReader):
    """Rank 1 dies, or stands still, when the tensors are read."""

    def __init__(self, path, how):
        super().__init__(path)
        self.how = how

    def read_data(self, plan, planner):
        if dist.get_rank() == 1 and any("exp_avg" in item.dest_index.fqn for item in plan.items):
            os.kill(os.getpid(), self.how) if self.how else time.sleep(8)
        return super().read_data(plan, planner)


def _lose_a_rank(rank, folder, how):
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=3))
    engine = _engine(rank, group=group)
    _step(engine)
    engine.save_dcp(f"{folder}/saved")
    error = _caught(lambda: engine.load_dcp(f"{folder}/saved", storage_reader=Lethal(f"{folder}/saved", how)))
    assert _caught(lambda: engine.step_optimizer(1.0))[0] == "StateNotReady"
    Path(folder, f"error-{rank}").write_text(repr(error))
    return error


def test_a_rank_that_dies_ends_its_peers_with_an_error_that_says_so(tmp_path):
    start = time.monotonic()
    with pytest.raises(RankFailed, match="rank 1 ---\ndied with exit code -9"):
        run_ranks(_lose_a_rank, 2, str(tmp_path), signal.SIGKILL, timeout_seconds=60)
    assert time.monotonic() - start < 40
    kind, text, shown, seconds = eval((tmp_path / "error-0").read_text())
    assert (kind, shown) == ("RankFailed", 1)
    assert "a rank went away; could not read the checkpoint's tensors" in text
    assert seconds < SECONDS


def test_a_rank_that_hangs_ends_its_peers_by_the_groups_timeout(tmp_path):
    errors = run_ranks(_lose_a_rank, 2, str(tmp_path), 0, timeout_seconds=60)
    assert [kind for kind, _, _, _ in errors] == ["RankFailed", "RankFailed"]
    _, text, shown, seconds = errors[0]
    assert "a rank did not answer within the group's timeout" in text
    assert shown == 1
    assert 2.5 < seconds < SECONDS
