"""What torch's own loader must read, made safe: plain data in byte leaves, and tensor records of unusual form.

Owns the guard around `torch.load(weights_only=True)`: bounded sizes, harmless structure, checksums, typed errors.
Classes that the user has allowed (`torch.serialization.add_safe_globals`) are honoured. Must not know files or plans.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from orlop import compat
from orlop.dcp.archive import Member, Unusual, content_at, raw_at, read_directory
from orlop.dcp.checksums import crc32
from orlop.dcp.inflated import inflated, most_unfolded
from orlop.dcp.pickled import read_pickle
from orlop.dcp.standard import dtype_name
from orlop.errors import CheckpointCorrupt, CheckpointUnsafe

__all__ = ["check_members", "load", "load_tensor", "repacked", "undone"]

ReadAt = Callable[[int, int], bytes]


def load(content: bytes, where: str) -> Any:
    """The value in a record that `torch.save` wrote.

    Args:
        content: The whole record.
        where: Leaf and file, for messages.

    Raises:
        CheckpointUnsafe: It holds more than plain data; nothing of it ran.
        CheckpointCorrupt: It can't be read.
    """
    _require_harmless(content, where)
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointUnsafe(
            "a record holds more than plain data; nothing of it was executed",
            where=where,
            found=_unsafe_globals(content) or _brief(error),
            todo="if you trust that class, allow it with torch.serialization.add_safe_globals; otherwise save the "
            "checkpoint again as plain data with the code that wrote it, in a sandbox",
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise CheckpointCorrupt("a record can't be read", where=where, found=_brief(error)) from error


def _unsafe_globals(content: bytes) -> str:
    """The names in the record that torch does not allow; empty when it can't tell."""
    try:
        return ", ".join(sorted(torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(content))))[
            :300
        ]
    except Exception:
        # Whatever is wrong with the record: the caller raises for it anyway.
        return ""


def _brief(error: BaseException) -> str:
    lines = str(error).splitlines()
    return (lines[0] if lines else type(error).__name__)[:300]


def repacked(content: bytes, where: str) -> io.BytesIO:
    """The same value in a record that was made here: whoever unpickles it, unpickles nothing of the checkpoint's.

    Raises:
        CheckpointUnsafe: As `load`.
        CheckpointCorrupt: As `load`.
    """
    packed = io.BytesIO()
    torch.save(load(content, where), packed)
    packed.seek(0)
    return packed


def _require_harmless(content: bytes, where: str) -> None:
    """Torch's restricted unpickler allows no code, but trusts sizes and nesting."""
    read: ReadAt = lambda offset, nbytes: content[offset : offset + nbytes]  # noqa: E731
    try:
        members = read_directory(read, len(content), where)
        if sum(member.nbytes for member in members.values()) > most_unfolded(len(content)):
            raise CheckpointCorrupt("a record would unfold to many times its size", where=where)
        for name, member in members.items():
            if name.endswith("/data.pkl") and member.is_stored:
                at = content_at(read, member, name, len(content), where)
                read_pickle(content[at : at + member.nbytes], None, where)
    except Unusual:
        return


def check_members(read: ReadAt, nbytes: int, where: str) -> str | None:
    """Compare the checksums of all files inside a record with what is there.

    Returns:
        Why (some of) it can't be checked; None when all of it was.

    Raises:
        CheckpointCorrupt: One differs, or the record is damaged.
    """
    try:
        members = read_directory(read, nbytes, where)
        reasons = [_check_member(read, member, name, nbytes, where) for name, member in members.items()]
    except Unusual as reason:
        return str(reason)
    return next(filter(None, reasons), None)


def _check_member(read: ReadAt, member: Member, name: str, nbytes: int, where: str) -> str | None:
    if not member.crc and member.nbytes:
        return "its record carries no checksum"
    content = read(raw_at(read, member, name, nbytes, where), member.stored_bytes)
    if not member.is_stored:
        # Torch's own loader does not compare checksums: a damaged method makes it inflate what is no deflate stream.
        content = inflated(content, member, nbytes)
    if len(content) != member.nbytes or crc32(content) != member.crc:
        raise CheckpointCorrupt(
            "a checksum differs: the file was damaged after it was written", where=f"{where}: {name}"
        )
    return None


def load_tensor(content: bytes, sizes: tuple[int, ...], dtype: str, where: str) -> Tensor:
    """A tensor from a record of unusual form.

    Args:
        content: The whole record.
        sizes: Its shape, by the metadata.
        dtype: Its dtype, by the metadata.
        where: Leaf and file, for messages.

    Raises:
        CheckpointUnsafe: It holds more than a tensor.
        CheckpointCorrupt: It can't be read, or is not what the metadata says.
    """
    value = load(content, where)
    if not isinstance(value, Tensor) or tuple(value.shape) != sizes or dtype_name(value.dtype) != dtype:
        found = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise CheckpointCorrupt(
            "a record is not what the metadata says", where=where, expected=f"{dtype} {sizes}", found=found
        )
    return value


def undone(content: bytes, transforms: tuple[str, ...], most_bytes: int, where: str) -> bytes:
    """A record as it was before its bytes were transformed.

    Args:
        content: What is stored.
        transforms: What was applied.
        most_bytes: How long it can be.
        where: Leaf and file, for messages.

    Raises:
        CheckpointCorrupt: They can't be undone, or it gets longer than that.
    """
    try:
        # Some streams give less than they are asked for, a block at a time.
        decoded, stream = bytearray(), compat.decoded_stream(io.BytesIO(content), transforms)
        while len(decoded) <= most_bytes and (part := stream.read(most_bytes + 1 - len(decoded))):
            decoded += part
    except Exception as error:
        # Whatever an extension raises: it is not installed, or the bytes are not of its kind.
        raise CheckpointCorrupt(
            "a record's transforms can't be undone",
            where=where,
            expected=", ".join(transforms),
            found=_brief(error),
        ) from error
    if len(decoded) > most_bytes:
        raise CheckpointCorrupt("a record unfolds to more than its leaf", where=where)
    return bytes(decoded)
