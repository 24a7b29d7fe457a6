"""The safetensors format, written: the header before the tensors, and the index over several files.

Owns names of dtypes, the header's form, how tensors are shared out to files. Pure. Must not know checkpoints or torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orlop.dcp.dtypes import ITEM_BYTES

__all__ = ["DTYPES", "Planned", "plan_files", "render_header", "render_index"]

DTYPES: dict[str, str] = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "complex64": "C64",
}
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One tensor as it will be written.

    Attributes:
        name: In the file.
        leaf: In the checkpoint.
        dtype: Torch's name of the dtype it is written in.
        sizes: Its shape.
    """

    name: str
    leaf: str
    dtype: str
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.sizes) * ITEM_BYTES[self.dtype]


def plan_files(tensors: Sequence[Planned], most_bytes: int) -> dict[str, list[Planned]]:
    """Share tensors out to files as Hugging Face names them; order is kept, a larger tensor has a file of its own."""
    shares: list[list[Planned]] = [[]]
    filled = 0
    for tensor in tensors:
        if shares[-1] and filled + tensor.nbytes > most_bytes:
            shares.append([])
            filled = 0
        shares[-1].append(tensor)
        filled += tensor.nbytes
    if len(shares) == 1:
        return {"model.safetensors": shares[0]}
    count = len(shares)
    return {f"model-{number:05d}-of-{count:05d}.safetensors": share for number, share in enumerate(shares, 1)}


def render_header(tensors: Sequence[Planned]) -> bytes:
    """What stands before the tensors' bytes, which follow one after the other."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": tensor.sizes,
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def render_index(files: Mapping[str, Sequence[Planned]]) -> bytes:
    """`model.safetensors.index.json`: which tensor is in which file."""
    total = sum(tensor.nbytes for share in files.values() for tensor in share)
    weights = {tensor.name: file for file, share in files.items() for tensor in share}
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}
    return json.dumps(content, indent=2).encode() + b"\n"
