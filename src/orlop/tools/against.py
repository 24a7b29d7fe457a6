"""`verify --against`: the checkpoint's model entries compared with those of a model that a function makes.

The function runs on the meta device, so that it takes no memory; it is the user's own code. Needs torch.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from orlop.dcp.catalog import TensorEntry
from orlop.dcp.standard import dtype_name
from orlop.errors import CheckpointNotFound
from orlop.tools.findings import Finding
from orlop.tools.opened import Opened

__all__ = ["check_against"]

_SHOWN = 3


def check_against(path: str | os.PathLike[str], spec: str) -> list[Finding]:
    """Compare names, shapes and dtypes.

    Args:
        path: The checkpoint.
        spec: `module:function`, found from the current directory; the function takes nothing and returns the model.

    Raises:
        CheckpointNotFound: There is no such function.
        CheckpointError: The checkpoint can't be read.
    """
    wanted = {name: value for name, value in _model(spec).state_dict().items() if isinstance(value, Tensor)}
    leaves = Opened(path).catalog.leaves
    stored = {
        leaf.removeprefix("model."): entry for leaf, entry in leaves.items() if leaf.startswith("model.")
    }
    if not stored:  # weights that were saved without any nesting
        stored = {leaf: entry for leaf, entry in leaves.items() if ".state." not in leaf}
    return list(_compare(wanted, stored))


def _model(spec: str) -> nn.Module:
    module_name, _, function = spec.partition(":")
    if not function:
        raise CheckpointNotFound(
            "a model is given as module:function", where=spec, todo="e.g. my_models:build"
        )
    sys.path.insert(0, os.getcwd())
    try:
        build = getattr(importlib.import_module(module_name), function)
    except (ImportError, AttributeError) as error:
        raise CheckpointNotFound("there is no such function", where=spec, found=str(error)) from error
    finally:
        sys.path.pop(0)
    with torch.device("meta"):
        model = build()
    if not isinstance(model, nn.Module):
        raise CheckpointNotFound("it makes no torch.nn.Module", where=spec, found=type(model).__name__)
    return model


def _compare(wanted: Mapping[str, Tensor], stored: Mapping[str, TensorEntry | None]) -> Iterator[Finding]:
    if wanted and not wanted.keys() & stored.keys():
        yield Finding(
            kind="names",
            where="model",
            what="nothing matched: not one name of the model is in the checkpoint",
            expected=", ".join(sorted(wanted)[:_SHOWN]),
            found=", ".join(sorted(stored)[:_SHOWN]) or "no model",
            todo="a wrapper's prefix (module., _orig_mod.) often makes the difference",
        )
        return
    for name, value in wanted.items():
        leaf = f"model.{name}"
        if name not in stored:
            yield Finding(kind="missing", where=leaf, what="the model has it, the checkpoint has not")
            continue
        entry = stored[name]
        if entry is None:
            yield Finding(kind="kind", where=leaf, what="a tensor in the model, plain data in the checkpoint")
        elif entry.sizes != tuple(value.shape):
            expected, found = str(tuple(value.shape)), str(entry.sizes)
            yield Finding(kind="shape", where=leaf, what="its shape differs", expected=expected, found=found)
        elif entry.dtype != dtype_name(value.dtype):
            expected = dtype_name(value.dtype)
            yield Finding(
                kind="dtype", where=leaf, what="its dtype differs", expected=expected, found=entry.dtype
            )
    for name in stored.keys() - wanted.keys():
        yield Finding(
            kind="unexpected", where=f"model.{name}", what="the checkpoint has it, the model has not"
        )
