"""The proof before a save, on hand-made plans of several ranks."""

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from orlop.dcp.coverage import require_whole
from orlop.errors import CheckpointIncomplete, CheckpointMismatch


def plan(*items):
    return SavePlan([item(*arguments) for arguments in items])


def item(offset, size, total=4, dtype=torch.float32):
    chunk = ChunkStorageMetadata(offsets=torch.Size([offset]), sizes=torch.Size([size]))
    return WriteItem(
        index=MetadataIndex("w", torch.Size([offset])),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=chunk, properties=TensorProperties(dtype=dtype), size=torch.Size([total])
        ),
    )


def test_shards_and_replicas_that_make_the_whole_pass():
    require_whole([plan((0, 2)), plan((2, 2)), plan((0, 2)), plan((4, 0))])


@pytest.mark.parametrize(
    "plans, error, found",
    [
        ([plan((0, 2))], CheckpointIncomplete, "ranks hold 2 of its 4 elements"),
        ([plan((0, 3)), plan((2, 2))], CheckpointIncomplete, "overlap"),
        ([plan((0, 2)), plan((3, 2))], CheckpointIncomplete, "leaves"),
        ([plan((0, 4)), plan((0, 5, 5))], CheckpointMismatch, "on rank 1: shape (5,)"),
        ([plan((0, 4)), plan((0, 4, 4, torch.int32))], CheckpointMismatch, "torch.int32"),
    ],
)
def test_gaps_overlaps_and_disagreement_are_named(plans, error, found):
    with pytest.raises(error) as caught:
        require_whole(plans)
    assert caught.value.where == "w"
    assert found in caught.value.found
