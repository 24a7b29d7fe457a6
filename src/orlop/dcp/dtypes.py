"""Torch's dtypes by name: their size, and the storage class under which `torch.save` files them.

Pure tables. Must not import torch; `tests/unit/dcp/test_dtypes.py` holds them against it.
"""

from __future__ import annotations

__all__ = ["ITEM_BYTES", "LEGACY_STORAGES", "OTHER_DTYPES", "STORAGE_DTYPES"]

ITEM_BYTES: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "uint16": 2,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "uint32": 4,
    "int32": 4,
    "float32": 4,
    "complex32": 4,
    "uint64": 8,
    "int64": 8,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}

# The dtypes that have a storage class of their own; the others are filed as untyped storage with the dtype beside it.
LEGACY_STORAGES: dict[str, str] = {
    "bool": "BoolStorage",
    "uint8": "ByteStorage",
    "int8": "CharStorage",
    "int16": "ShortStorage",
    "int32": "IntStorage",
    "int64": "LongStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "float32": "FloatStorage",
    "float64": "DoubleStorage",
    "complex64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
}

STORAGE_DTYPES: dict[str, str] = {f"torch.{storage}": dtype for dtype, storage in LEGACY_STORAGES.items()}

# Dtypes that a checkpoint may hold, and that only torch's own loader reads.
OTHER_DTYPES = frozenset(
    {"qint8", "quint8", "qint32", "quint4x2", "quint2x4", "bits1x8", "bits2x4", "bits4x2", "bits8", "bits16"}
    | {f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)}
)
