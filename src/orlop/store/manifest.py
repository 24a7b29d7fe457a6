"""`orlop.json`: what orlop notes beside DCP's own files, as a typed model and as a file.

Owns the schema and its version. Must not know how a checkpoint is published or loaded.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from orlop.errors import CheckpointCorrupt, CheckpointError, CheckpointIncomplete
from orlop.store import files
from orlop.store.sealed import seal, unseal
from orlop.version import __version__

MANIFEST_NAME = "orlop.json"
CATALOG_NAME = "metadata.json"
SCHEMA_VERSION = 1


def _now() -> datetime:
    return datetime.now(timezone.utc).replace(microsecond=0)


class UnevenState(BaseModel):
    """One parameter whose optimizer state was not the same on all ranks that hold it.

    Attributes:
        layout: Its mesh and placements as text; `""` for a plain tensor.
        boxes: For each rank the offsets and sizes of its part; null where it held none.
        ranks: For each rank its scalars (`step`); null where it had no state.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="constants")

    layout: str
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]] | None]
    ranks: list[dict[str, int | float] | None]


class StateKeys(BaseModel):
    """Which keys of state the parameters of one optimizer had.

    Attributes:
        usual: What most of them had.
        others: By FQN, what those had that had something else.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    usual: tuple[str, ...] = ()
    others: dict[str, tuple[str, ...]] = {}

    @classmethod
    def of(cls, keys: Mapping[str, Iterable[str]]) -> StateKeys:
        """In short what is given for each parameter."""
        each = {fqn: tuple(sorted(theirs)) for fqn, theirs in keys.items()}
        usual = max(sorted(Counter(each.values()).items()), key=lambda pair: pair[1], default=((), 0))[0]
        return cls(usual=usual, others={fqn: theirs for fqn, theirs in each.items() if theirs != usual})

    def __getitem__(self, fqn: str) -> tuple[str, ...]:
        return self.others.get(fqn, self.usual)


class Manifest(BaseModel):
    """What `orlop.json` holds. Unknown fields are ignored, so that an addition keeps the schema version.

    Attributes:
        schema_version: Of this file's layout; raised when an old reader would misunderstand a new file.
        step: The training step that was saved, where the caller knows one.
        created: When, in UTC.
        orlop_version: Of the writer.
        torch_version: Of the writer.
        world_size: Ranks that wrote.
        meshes: Every mesh that a saved tensor was spread over, as text.
        optimizer_classes: Class name of each saved optimizer, by the optimizer's name: the class whose rule it
            follows, host-resident or not.
        absent: FQNs of the parameters without state (never stepped, or of a class that keeps none), by optimizer
            name. Initial values may be stored for them, for readers other than orlop.
        state_keys: The keys of state that the other parameters had, by optimizer name. Where it is missing, nothing is
            known of them.
        uneven: Parameters with state on some ranks only, or with other scalars on each, by optimizer name and FQN.
        left_out: FQNs of the model's entries that were not saved, on purpose.
        aliases: FQN of a tied entry to the FQN that its bytes were written for.
        group_firsts: In the flattened layout, which keeps no groups: the first FQN of each param group, in order, by
            optimizer name.
        group_keys: The hyperparameters that every param group had, by optimizer name.
        parts: The other parts: one content for all ranks, or one per rank.
        files: Every file of the checkpoint but this one, with its size in bytes.
        digests: SHA-256 (hex) of each small file that orlop wrote beside DCP's own: the indexes of the data files, and
            the metadata's sealed twin.
        fingerprint: Digest (hex) by leaf, if it was asked for.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="constants")

    schema_version: int = SCHEMA_VERSION
    step: int | None = None
    created: AwareDatetime = Field(default_factory=_now)
    orlop_version: str = __version__
    torch_version: str
    world_size: int
    meshes: list[str] = []
    optimizer_classes: dict[str, str] = {}
    absent: dict[str, list[str]] = {}
    state_keys: dict[str, StateKeys] = {}
    uneven: dict[str, dict[str, UnevenState]] = {}
    left_out: list[str] = []
    aliases: dict[str, str] = {}
    group_firsts: dict[str, list[str]] = {}
    group_keys: dict[str, list[str]] = {}
    parts: dict[str, Literal["replicated", "per_rank"]] = {}
    files: dict[str, int] = {}
    digests: dict[str, str] = {}
    fingerprint: dict[str, str] | None = None


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Writes and fsyncs `directory/orlop.json`, sealed."""
    files.write_file(directory / MANIFEST_NAME, render_manifest(manifest))


def render_manifest(manifest: Manifest) -> bytes:
    """The content of `orlop.json`, sealed."""
    return seal(manifest.model_dump_json(indent=2))


def read_manifest(directory: Path) -> Manifest | None:
    """Reads `directory/orlop.json`; None when there is none (a checkpoint that plain DCP wrote).

    Raises:
        CheckpointIncomplete: There was one, or should have been.
        CheckpointCorrupt: As `parse_manifest`.
        CheckpointError: As `parse_manifest`.
    """
    path = directory / MANIFEST_NAME
    try:
        data = files.read_file(path)
    except FileNotFoundError:
        with suppress(FileNotFoundError, NotADirectoryError):
            if promises_manifest(files.read_file(directory / CATALOG_NAME)):
                raise lost_manifest(str(path)) from None
        return None
    return parse_manifest(data, str(path))


def promises_manifest(catalog: bytes) -> bool:
    """Whether the content of a `metadata.json` says that a manifest was to follow; False where it can't be read."""
    try:
        content = json.loads(catalog)
    except (ValueError, RecursionError):
        return False  # who reads it says so
    return isinstance(content, dict) and content.get("manifest") is True


def lost_manifest(where: str) -> CheckpointIncomplete:
    """The error for a checkpoint whose other files promise a manifest.

    Args:
        where: The manifest's path.
    """
    return CheckpointIncomplete(
        "A checkpoint is not complete.",
        where=where,
        found=f"{MANIFEST_NAME} is missing: the save was never finished, or the file was lost since",
        todo="take another checkpoint; or, to have what is there read as a plain DCP checkpoint, which says nothing of "
        f"parameters without state, remove its {CATALOG_NAME} and *.index.json",
    )


def parse_manifest(data: bytes, where: str) -> Manifest:
    """The manifest in the content of an `orlop.json`.

    Args:
        data: The content.
        where: Its path, for messages.

    Raises:
        CheckpointCorrupt: It is no JSON, damaged (its seal tells), or not of this schema.
        CheckpointError: A newer orlop wrote it, in a schema that this one doesn't know.
    """
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:  # also UnicodeDecodeError
        raise CheckpointCorrupt("A manifest can't be read.", where=where, found=str(error)) from error
    # The version is looked at before anything else: a newer schema may change every other field.
    version = content.get("schema_version") if isinstance(content, dict) else None
    if isinstance(version, int) and version > SCHEMA_VERSION:
        writer = content.get("orlop_version", "unknown")
        raise CheckpointError(
            "This checkpoint was written by a newer orlop.",
            where=where,
            expected=f"schema_version up to {SCHEMA_VERSION}",
            found=f"schema_version {version}, written by orlop {writer}",
            todo="update orlop, or choose an older checkpoint by its step",
        )
    try:
        unseal(data)
    except ValueError as error:
        raise CheckpointCorrupt("A manifest is damaged.", where=where, found=str(error)) from error
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "the whole file"
        raise CheckpointCorrupt(
            "A manifest is not as its schema says.", where=where, found=f"{field}: {first['msg']}"
        ) from error
