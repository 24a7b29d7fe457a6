"""Checkpoints written anew after an edit: what is lost, renamed or strange in them is so on purpose."""

import pickle
import re
import shutil
import zipfile

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, FileSystemWriter

from orlop.store.manifest import read_manifest, write_manifest


def keys(path):
    return set(FileSystemReader(path).read_metadata().state_dict_metadata)


def rewrite(path, change=lambda flat: None, *, to=None, keep_record=True):
    """Write a checkpoint anew, in place or as `to`, after `change` of its flat dict; with orlop's record or without."""
    to = path if to is None else to
    metadata = FileSystemReader(path).read_metadata()
    flat = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype) if hasattr(entry, "size") else None
        for key, entry in metadata.state_dict_metadata.items()
    }
    dcp.load(flat, checkpoint_id=path)
    change(flat)
    record = read_manifest(path)
    shutil.rmtree(to, ignore_errors=True)
    # Leaf by leaf as it stands there: DCP would make leaves of a list's tensors.
    dcp.save(flat, storage_writer=FileSystemWriter(to), planner=DefaultSavePlanner(flatten_state_dict=False))
    if keep_record:
        write_manifest(to, record.model_copy(update={"digests": {}, "files": {}}))


def drop(*patterns):
    """A change: without the keys that match."""

    def change(flat):
        for key in [key for key in flat if any(re.fullmatch(pattern, key) for pattern in patterns)]:
            del flat[key]

    return change


def compress(path, change=lambda name, content: content):
    """Write the only record of a checkpoint anew, compressed, and point the metadata at it."""
    data = path / "__0_0.distcp"
    with zipfile.ZipFile(data) as old:
        members = {name: change(name, old.read(name)) for name in old.namelist()}
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as new:
        for name, content in members.items():
            new.writestr(name, content)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    (info,) = metadata.storage_data.values()
    info.length = data.stat().st_size
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
