"""`verify --against`: the checkpoint's model entries compared with those of a model that a function makes.

The function runs on the meta device, so that it takes no memory; it is the user's own code. Needs torch.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from orlop.dcp.catalog import TensorEntry
from orlop.dcp.standard import dtype_name
from orlop.errors import OrlopError
from orlop.tools.findings import Finding
from orlop.tools.leaf_names import group_option, optimizer_names, split_state
from orlop.tools.opened import Opened

__all__ = ["build_model", "check_against"]

_SHOWN = 3


def build_model(spec: str) -> nn.Module:
    """The model that a function makes, on the meta device.

    Args:
        spec: `module:function` or `file.py:function`, found from the current directory; the function (or class) takes
            nothing and returns the model.

    Raises:
        OrlopError: There is no such file, module or function, or it fails, or makes no model.
    """
    name, _, function = spec.partition(":")
    if name.endswith(".py") and not Path(name).is_file():
        raise OrlopError("there is no such file", where=str(Path.cwd() / name))
    folder, stem = (Path(name).parent, Path(name).stem) if name.endswith(".py") else (Path(), name)
    place = str(Path.cwd() / folder)
    sys.path.insert(0, place)
    try:
        return _build(spec, stem, function)
    finally:
        sys.path.remove(place)


def _build(spec: str, stem: str, function: str) -> nn.Module:
    try:
        module = importlib.import_module(stem)
    except ModuleNotFoundError as error:
        todo = "modules are found from the current directory and where Python looks; or give file.py:function"
        raise OrlopError("the module can't be imported", where=spec, found=_said(error), todo=todo) from error
    except (Exception, SystemExit) as error:
        todo = "it is imported: what it does when it is run as a script belongs below `if __name__ == ...`"
        raise OrlopError("the module can't be imported", where=spec, found=_said(error), todo=todo) from error
    try:
        build = getattr(module, function)
    except AttributeError as error:
        raise OrlopError("there is no such function", where=spec, found=str(error)) from error
    try:
        with torch.device("meta"):
            model = build()
    except (Exception, SystemExit) as error:
        todo = "it is called without arguments, on the meta device, where tensors have no values"
        raise OrlopError("the function fails", where=spec, found=_said(error), todo=todo) from error
    if not isinstance(model, nn.Module):
        raise OrlopError("it makes no torch.nn.Module", where=spec, found=type(model).__name__)
    return model


def _said(error: BaseException) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def check_against(path: str | os.PathLike[str], model: nn.Module) -> list[Finding]:
    """Compare names, shapes and dtypes.

    Args:
        path: The checkpoint.
        model: Whose entries it should hold.

    Raises:
        CheckpointError: The checkpoint can't be read.
    """
    wanted = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    opened = Opened(path)
    prefix, stored = _model_entries(wanted, opened.catalog.leaves, is_own=opened.manifest is not None)
    left_out = frozenset() if opened.manifest is None else frozenset(opened.manifest.left_out)
    return list(_compare(wanted, stored, prefix, left_out))


def _model_entries(
    wanted: Mapping[str, Tensor], leaves: Mapping[str, TensorEntry | None], *, is_own: bool
) -> tuple[str, dict[str, TensorEntry | None]]:
    """What the model's leaves start with, and its entries: where a load looks for them.

    Args:
        wanted: The model's.
        leaves: The checkpoint's.
        is_own: Whether orlop saved it, which never leaves out `model.`.
    """
    nested = {
        leaf.removeprefix("model."): entry for leaf, entry in leaves.items() if leaf.startswith("model.")
    }
    is_at_top = not is_own and not wanted.keys().isdisjoint(leaves) and wanted.keys().isdisjoint(nested)
    if is_at_top:  # other parts stand beside it
        roots = {name.partition(".")[0] for name in wanted}
        return "", {leaf: entry for leaf, entry in leaves.items() if leaf.partition(".")[0] in roots}
    if nested:
        return "model.", nested
    # Nothing matches: whatever may be weights is shown.
    optimizers = optimizer_names(leaves)
    return "", {
        leaf: entry
        for leaf, entry in leaves.items()
        if entry is not None and split_state(leaf, optimizers) is None and group_option(leaf) is None
    }


def _compare(
    wanted: Mapping[str, Tensor],
    stored: Mapping[str, TensorEntry | None],
    prefix: str,
    left_out: Collection[str],
) -> Iterator[Finding]:
    if wanted.keys() - left_out and not wanted.keys() & stored.keys():
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
        leaf = f"{prefix}{name}"
        if name not in stored:
            if name not in left_out:
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
    for name in sorted(stored.keys() - wanted.keys()):
        yield Finding(
            kind="unexpected", where=f"{prefix}{name}", what="the checkpoint has it, the model has not"
        )
