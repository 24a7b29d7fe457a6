"""Which small files are believed: seals, digests, and records that the metadata promises."""

import pickle
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp

from orlop import TrainEngine
from orlop.dcp import Reader
from orlop.errors import CheckpointCorrupt, CheckpointIncomplete

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def engine(value):
    model = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(model.weight, value)
    return TrainEngine(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("name", ["__0_0.index.json", "metadata.json", ".metadata"])
def test_s2_s3_files_of_two_saves_are_not_mixed(tmp_path, name):
    for number in (1, 2):
        engine(number).save_dcp(tmp_path / str(number))
    shutil.copy(tmp_path / "2" / name, tmp_path / "1" / name)
    other = engine(3)
    with pytest.raises(CheckpointCorrupt, match=r"that was written|what was written") as caught:
        other.load_dcp(tmp_path / "1")
    assert str(tmp_path / "1" / name) in str(caught.value.where)
    assert torch.equal(other.model.weight, torch.full((2, 2), 3.0))


def test_c7_a_chunk_without_a_record_is_incomplete(tmp_path):
    path = tmp_path / "x"
    dcp.save({"w": torch.ones(4), "other": torch.ones(2)}, storage_writer=dcp.FileSystemWriter(path))
    metadata = pickle.loads((path / ".metadata").read_bytes())
    (index,) = [index for index in metadata.storage_data if index.fqn == "w"]
    del metadata.storage_data[index]
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    target = {"w": torch.full((4,), 7.0)}
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load(target, storage_reader=Reader(path))
    (cause,) = [failure[0] for failure in caught.value.failures.values()]
    assert isinstance(cause, CheckpointIncomplete)
    assert cause.where == f"w in {path}"
    assert torch.equal(target["w"], torch.full((4,), 7.0))
