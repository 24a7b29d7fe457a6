"""`orlop.json`: what orlop notes beside DCP's own files, as a typed model and as a file.

Owns the schema and its version. Must not know how a checkpoint is published or loaded.
"""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from orlop.errors import CheckpointCorrupt, CheckpointError
from orlop.store import files
from orlop.version import __version__

MANIFEST_NAME = "orlop.json"
SCHEMA_VERSION = 1


def _now() -> datetime:
    return datetime.now(timezone.utc).replace(microsecond=0)


class Manifest(BaseModel):
    """What `orlop.json` holds. Unknown fields are ignored, so that an addition keeps the schema version.

    Attributes:
        schema_version: Of this file's layout; raised when an old reader would misunderstand a new file.
        step: The training step that was saved, where the caller knows one.
        created: When, in UTC.
        orlop_version: Of the writer.
        torch_version: Of the writer.
        world_size: Ranks that wrote.
        optimizer_classes: Class name of each saved optimizer, by the optimizer's name.
        absent: FQNs of the parameters that never took a step and so have no state, by optimizer name.
        parts: The other parts: one content for all ranks, or one per rank.
        files: Every file of the checkpoint but this one, with its size in bytes.
        fingerprint: Digest (hex) by leaf, if it was asked for.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    schema_version: int = SCHEMA_VERSION
    step: int | None = None
    created: AwareDatetime = Field(default_factory=_now)
    orlop_version: str = __version__
    torch_version: str
    world_size: int
    optimizer_classes: dict[str, str] = {}
    absent: dict[str, list[str]] = {}
    parts: dict[str, Literal["replicated", "per_rank"]] = {}
    files: dict[str, int] = {}
    fingerprint: dict[str, str] | None = None


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Writes and fsyncs `directory/orlop.json`."""
    files.write_file(directory / MANIFEST_NAME, (manifest.model_dump_json(indent=2) + "\n").encode())


def read_manifest(directory: Path) -> Manifest | None:
    """Reads `directory/orlop.json`; None when there is none (a checkpoint that plain DCP wrote).

    Raises:
        CheckpointCorrupt: It is no JSON, or not of this schema.
        CheckpointError: A newer orlop wrote it, in a schema that this one doesn't know.
    """
    path = directory / MANIFEST_NAME
    try:
        content = json.loads(files.read_file(path))
    except FileNotFoundError:
        return None
    except ValueError as error:  # also UnicodeDecodeError
        raise CheckpointCorrupt("A manifest can't be read.", where=str(path), found=str(error)) from error
    # The version is looked at before anything else: a newer schema may change every other field.
    version = content.get("schema_version") if isinstance(content, dict) else None
    if isinstance(version, int) and version > SCHEMA_VERSION:
        writer = content.get("orlop_version", "unknown")
        raise CheckpointError(
            "This checkpoint was written by a newer orlop.",
            where=str(path),
            expected=f"schema_version up to {SCHEMA_VERSION}",
            found=f"schema_version {version}, written by orlop {writer}",
            todo="update orlop, or choose an older checkpoint by its step",
        )
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "the whole file"
        raise CheckpointCorrupt(
            "A manifest is not as its schema says.", where=str(path), found=f"{field}: {first['msg']}"
        ) from error
