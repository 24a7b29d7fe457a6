"""JSON files that tell when they were damaged: their last field is a digest of every byte before it.

Owns the seal. Must not know what a file says.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

__all__ = ["digest", "seal", "unseal"]

_SEAL = re.compile(rb',\n  "digest": "([0-9a-f]{64})"\n}\n\Z')
_SEAL_BYTES = len(b',\n  "digest": ""\n}\n') + 64


def digest(data: bytes | memoryview) -> str:
    """The SHA-256 of some bytes, in hex."""
    return hashlib.sha256(data).hexdigest()


def seal(text: str) -> bytes:
    """A JSON object's text with the digest as its last field.

    Args:
        text: A JSON object with at least one field and no field `digest`.
    """
    body = text.rstrip().removesuffix("}").rstrip().encode()
    return body + f',\n  "digest": "{digest(body)}"\n}}\n'.encode()


def unseal(data: bytes) -> dict[str, Any]:
    """The object in a sealed file.

    Raises:
        ValueError: The seal is missing or wrong, or it is no JSON object; also RecursionError becomes one.
    """
    match = _SEAL.search(data, max(0, len(data) - _SEAL_BYTES))
    if match is None:
        raise ValueError("its seal is missing: it is truncated or damaged")
    if digest(memoryview(data)[: match.start()]) != match[1].decode():
        raise ValueError("its digest differs: it is damaged")
    try:
        content = json.loads(data)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(content, dict):
        raise ValueError("it is no JSON object")
    content.pop("digest", None)
    return content
