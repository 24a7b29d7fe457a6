"""Checkpoints in object stores, end to end: fsspec's in-memory one, and a local S3 server."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from tests.fault.tiny import Tiny, expected_states, same
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import orlop
from orlop import CheckpointStore
from orlop.configs import LoadCheckpointConfig
from orlop.errors import CheckpointCorrupt, CheckpointExists, CheckpointIncomplete, CheckpointNotFound
from orlop.store.manifest import MANIFEST_NAME
from orlop.testing import run_ranks

STATES = expected_states(4)


@pytest.fixture
def root() -> Iterator[str]:
    system = fsspec.filesystem("memory")
    system.store.clear()
    yield "memory://bucket/run"
    system.store.clear()


def save(root: str, last: int, **options: Any) -> CheckpointStore:
    tiny, store = Tiny(), CheckpointStore(root, **options)
    for step in range(1, last + 1):
        store.save(tiny.train(step).engine, step)
    return store


def require_resumes(root: str, step: int) -> None:
    tiny = Tiny()
    resumed = CheckpointStore(root).resume(tiny.engine)
    assert resumed is not None
    assert resumed.step == step
    assert str(resumed.path) == f"{root}/step-{step:08d}"
    assert same(tiny.state(), STATES[step])


def names(root: str) -> list[str]:
    system, prefix = fsspec.url_to_fs(root)
    system.invalidate_cache()
    return sorted({key[len(prefix) + 1 :].partition("/")[0] for key in system.find(prefix)})


def test_save_resume_and_retention(root: str, caplog: pytest.LogCaptureFixture) -> None:
    store = CheckpointStore(root)
    with caplog.at_level(logging.INFO):
        assert store.resume(Tiny().engine) is None
    assert "fresh start" in caplog.text
    store = save(root, 3, keep_last=2)
    assert store.steps() == [2, 3]
    assert names(root) == ["step-00000002", "step-00000003"]
    assert str(store.path(3)) == f"{root}/step-00000003"
    require_resumes(root, 3)
    with pytest.raises(CheckpointExists):
        store.save(Tiny().train(3).engine, 3)
    with pytest.raises(CheckpointNotFound):
        store.resume(Tiny().engine, step=1)
    tiny = Tiny()
    assert store.resume(tiny.engine, step=2) is not None
    assert same(tiny.state(), STATES[2])


@pytest.mark.parametrize("name", [MANIFEST_NAME, "__0_0.distcp"])
def test_one_that_is_not_whole_is_passed_over_and_can_be_saved_anew(
    root: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = save(root, 2)
    fsspec.filesystem("memory").rm_file(f"/bucket/run/step-00000002/{name}")
    with caplog.at_level(logging.WARNING):
        require_resumes(root, 1)
    assert "step-00000002" in caplog.text
    with pytest.raises(CheckpointIncomplete):
        store.resume(Tiny().engine, step=2)
    if name == MANIFEST_NAME:
        # Without manifest and marker it may be anybody's: it is left alone.
        with pytest.raises(CheckpointExists):
            store.save(Tiny().train(2).engine, 2)
    else:
        store.save(Tiny().train(2).engine, 2)
        require_resumes(root, 2)


def test_a_flipped_bit_is_found_and_the_next_older_is_taken(root: str) -> None:
    store = save(root, 2)
    path = "/bucket/run/step-00000002/__0_0.distcp"
    system = fsspec.filesystem("memory")
    content = bytearray(system.cat_file(path))
    content[len(content) // 2] ^= 1
    system.pipe_file(path, bytes(content))
    with pytest.raises(CheckpointCorrupt, match=r"__0_0\.distcp"):
        store.resume(Tiny().engine, step=2)
    require_resumes(root, 1)


def test_engines_save_and_load_by_address(root: str) -> None:
    tiny = Tiny().train(2)
    tiny.engine.save_dcp(f"{root}/weights")
    with pytest.raises(CheckpointExists):
        tiny.engine.save_dcp(f"{root}/weights")
    other = Tiny()
    other.engine.load_dcp(f"{root}/weights")
    assert same(other.state(), STATES[2])


class Batches:
    """Three equal batches."""

    def __iter__(self) -> Iterator[Any]:
        yield from [torch.ones(2, 4)] * 3


def train(root: str, metrics: Path, total_steps: int, start: str | None = None) -> dict[str, Any]:
    model = Tiny()
    trainer = orlop.Trainer(
        model.engine,
        CheckpointStore(root),
        Batches(),
        total_steps=total_steps,
        save_every=2,
        resume=LoadCheckpointConfig(checkpoint_path=start),
        loss_fn=lambda model, batch: model(batch).square().mean(),
        metrics_path=metrics,
        progress_bar=False,
    )
    trainer.run()
    return model.state()


def test_a_trainer_resumes_from_a_remote_store_and_starts_from_another_ones_checkpoint(
    root: str, tmp_path: Path
) -> None:
    train(root, tmp_path / "one.jsonl", 2)
    resumed = train(root, tmp_path / "one.jsonl", 4)
    whole = train(f"{root}/whole", tmp_path / "two.jsonl", 4)
    started = train(f"{root}/started", tmp_path / "three.jsonl", 4, start=f"{root}/step-00000002")
    assert CheckpointStore(root).steps() == [2, 4]
    assert same(resumed, whole)
    assert same(started, whole)
    engine = Tiny().engine
    with pytest.raises(ValueError, match="metrics_path"):
        orlop.Trainer(engine, CheckpointStore(root), Batches(), total_steps=1, save_every=1)


# -- S3 ------------------------------------------------------------------------------------------------------


def use(endpoint: str) -> None:
    os.environ.update(
        AWS_ENDPOINT_URL=endpoint,
        AWS_ACCESS_KEY_ID="test",
        AWS_SECRET_ACCESS_KEY="test",
        AWS_DEFAULT_REGION="us-east-1",
    )


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    before = dict(os.environ)
    use(f"http://{host}:{port}")
    fsspec.filesystem("s3").mkdir("bucket")
    yield os.environ["AWS_ENDPOINT_URL"]
    os.environ.clear()
    os.environ.update(before)
    server.stop()


def test_s3_save_resume_and_retention(endpoint: str) -> None:
    store = save("s3://bucket/one", 3, keep_last=2)
    assert store.steps() == [2, 3]
    assert names("s3://bucket/one") == ["step-00000002", "step-00000003"]
    require_resumes("s3://bucket/one", 3)


def save_and_resume(rank: int, endpoint: str) -> list[int]:
    use(endpoint)
    store = save("s3://bucket/two", 2)
    require_resumes("s3://bucket/two", 2)
    return store.steps()


@pytest.mark.dist
def test_s3_two_ranks(endpoint: str) -> None:
    assert run_ranks(save_and_resume, 2, endpoint) == [[1, 2], [1, 2]]


ROWS, COLUMNS = 1024, 512


def wide() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(COLUMNS, ROWS, bias=False)


def load_rows(rank: int, endpoint: str) -> tuple[bool, int]:
    use(endpoint)
    mesh = init_device_mesh("cpu", (2,))
    model = wide()
    expected = model.weight.detach().clone()
    model.weight = nn.Parameter(distribute_tensor(torch.zeros(ROWS, COLUMNS), mesh, [Shard(0)]))
    engine = orlop.TrainEngine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    report = engine.load_dcp("s3://bucket/wide")
    return torch.equal(model.weight.full_tensor(), expected), report.bytes_read


@pytest.mark.dist
def test_s3_resharding_fetches_ranges(endpoint: str) -> None:
    model = wide()
    orlop.TrainEngine(model, torch.optim.SGD(model.parameters(), lr=0.1)).save_dcp("s3://bucket/wide")
    half = ROWS * COLUMNS * 4 // 2
    for equal, bytes_read in run_ranks(load_rows, 2, endpoint):
        assert equal
        assert half <= bytes_read <= 1.05 * half + 2**16
