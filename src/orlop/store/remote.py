"""A run's checkpoints in an object store, where nothing can be renamed: the manifest is the commit.

    begin (a marker) -> data objects -> the manifest, in one put -> the marker goes

A prefix is a checkpoint only when its manifest is there and lists every object with its size; so the manifest is
written last and removed first. Everything under a prefix with a marker and no manifest is what a save left that did
not finish, and may be removed; a prefix without either is somebody else's and is never touched. Must not know what
the data objects hold.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from orlop.errors import RootNotShared
from orlop.store import owned
from orlop.store.catalog import Unpublished, parse_step, parse_unpublished
from orlop.store.directory import Directory
from orlop.store.listing import Checkpoint, judge
from orlop.store.manifest import MANIFEST_NAME, Manifest, parse_manifest, render_manifest
from orlop.store.objects import RemoteDirectory, Url, open_file_system
from orlop.store.publish import exists_error

_log = logging.getLogger(__name__)

MARKER_NAME = "orlop.writing"

# Signatures of what this process writes and reads now.
_ours: set[str] = set()


class RemotePending:
    """A checkpoint that is being written under its final prefix.

    Args:
        url: The prefix.
        signature: From `begin`.
    """

    def __init__(self, url: Url, signature: str) -> None:
        self.path = url
        self._signature = signature
        self._objects = RemoteDirectory(url)

    @classmethod
    def begin(cls, url: Url) -> str:
        """Clears what an unfinished save left under `url` and marks the prefix as being written.

        Returns:
            What all ranks need to take part.

        Raises:
            CheckpointExists: A checkpoint, or something that orlop did not write, is there.
        """
        objects = RemoteDirectory(url)
        _clear_unfinished(objects)
        signature = owned.sign(url.name, "partial")
        objects.replace(MARKER_NAME, signature.encode())
        _ours.add(signature)
        return signature

    @property
    def directory(self) -> Directory:
        """Where this rank writes."""
        return self._objects

    def require_visible(self) -> None:
        """Checks that this rank sees the coordinator's marker.

        Raises:
            RootNotShared: It sees another store.
        """
        found = _marker(self._objects)
        if found != self._signature:
            raise RootNotShared(
                "The checkpoint's address does not lead all ranks to the same store.",
                where=f"host {socket.gethostname()}, {self.path / MARKER_NAME}",
                expected=self._signature,
                found=found or "no such object",
                todo="give all ranks one address, endpoint and credentials; memory:// is one process's own",
            )

    def require_space(self, needed: int) -> None:
        """Nothing: an object store has no end."""

    def publish(self, manifest: Manifest) -> None:
        """Makes it a checkpoint."""
        ours = (MARKER_NAME, MANIFEST_NAME)
        sizes = {name: size for name, size in self._objects.sizes().items() if name not in ours}
        content = render_manifest(manifest.model_copy(update={"files": sizes}))
        self._objects.replace(MANIFEST_NAME, content)
        _ours.discard(self._signature)
        try:
            self._objects.remove(MARKER_NAME)
        except OSError as error:
            # It is published; a marker beside a manifest means nothing.
            _log.debug("could not remove %s: %s", self.path / MARKER_NAME, error)

    def discard(self) -> None:
        """Removes what was written, after a failure."""
        _ours.discard(self._signature)
        if _marker(self._objects) == self._signature:
            _remove(self._objects)


def _clear_unfinished(objects: RemoteDirectory) -> None:
    names = objects.sizes()
    if not names:
        return
    if MANIFEST_NAME in names or MARKER_NAME not in names:
        raise exists_error(objects.url)
    _remove(objects)


def _remove(objects: RemoteDirectory) -> None:
    """The manifest first: from then on it is no checkpoint; the marker last: until then it can be told what it was."""
    order = {MANIFEST_NAME: 0, MARKER_NAME: 2}
    for name in sorted(objects.sizes(), key=lambda name: order.get(name, 1)):
        objects.remove(name)


def _marker(objects: RemoteDirectory) -> str | None:
    try:
        return objects.read(MARKER_NAME).decode(errors="replace")
    except FileNotFoundError:
        return None


class RemoteRoot:
    """A prefix that all ranks see; see `roots.Root`.

    Args:
        url: The prefix.
    """

    def __init__(self, url: Url) -> None:
        self._url = url
        self._signs: RemoteDirectory | None = None

    @property
    def _objects(self) -> RemoteDirectory:
        # Opened when it is first needed: only the coordinator looks.
        if self._signs is None:
            self._signs = RemoteDirectory(self._url)
        return self._signs

    def path(self, name: str) -> Url:
        """See `Root`."""
        return self._url / name

    def checkpoints(self) -> list[Checkpoint]:
        """See `Root`."""
        prefixes: dict[str, dict[str, int]] = {}
        for name, size in self._objects.sizes().items():
            head, _, rest = name.partition("/")
            if rest and parse_step(head) is not None and rest != MARKER_NAME:
                prefixes.setdefault(head, {})[rest] = size
        found = [self._judge(name, sizes) for name, sizes in prefixes.items()]
        return sorted(found, key=lambda checkpoint: checkpoint.step)

    def _judge(self, name: str, sizes: dict[str, int]) -> Checkpoint:
        step = parse_step(name)
        assert step is not None

        def read() -> Manifest | None:
            try:
                data = self._objects.read(f"{name}/{MANIFEST_NAME}")
            except FileNotFoundError:
                return None
            return parse_manifest(data, str(self._url / name / MANIFEST_NAME))

        return judge(self._url / name, step, read, lambda: sizes, needs_manifest=True)

    def sweep(self) -> None:
        """See `Root`."""
        names = self._objects.sizes()
        for name in names:
            head, _, rest = name.partition("/")
            sign = parse_unpublished(head)
            if not rest and sign is not None and sign.kind == "reading" and self._is_dead(head, sign):
                self._objects.remove(head)
            if (
                rest == MARKER_NAME
                and parse_step(head) is not None
                and f"{head}/{MANIFEST_NAME}" not in names
            ):
                self._sweep_unfinished(RemoteDirectory(self._url / head))

    def _sweep_unfinished(self, objects: RemoteDirectory) -> None:
        signature = _marker(objects) or ""
        sign = parse_unpublished(signature)
        if sign is not None and owned.is_dead(sign, signature in _ours, objects.last_change):
            _log.info("removing what a dead process left in %s", objects)
            _remove(objects)

    def _is_dead(self, signature: str, sign: Unpublished) -> bool:
        url = self._url / signature
        return owned.is_dead(sign, signature in _ours, lambda: _modified(url))

    def set_aside(self, found: Checkpoint, why: str) -> str:
        """Removes it: here nothing can be renamed, and a copy would cost as much as a save."""
        objects = RemoteDirectory(self._url / found.name)
        if found.manifest is None and MANIFEST_NAME not in objects.sizes():
            _clear_unfinished(objects)
        else:
            _remove(objects)
        return "removed"

    def retire(self, found: Checkpoint) -> None:
        """See `Root`."""
        _remove(RemoteDirectory(self._url / found.name))

    @contextmanager
    def reading(self, name: str) -> Iterator[None]:
        """See `Root`."""
        signature = owned.sign(name, "reading")
        _ours.add(signature)
        try:
            self._objects.replace(signature, b"reading")
        except Exception as error:
            _log.debug("can't show that %s is being read: %s", self._url / name, error)
        try:
            yield
        finally:
            _ours.discard(signature)
            with contextlib.suppress(Exception):
                self._objects.remove(signature)

    def being_read(self) -> set[str]:
        """See `Root`."""
        return {
            sign.final
            for name in self._objects.sizes()
            if (sign := parse_unpublished(name)) is not None
            and sign.kind == "reading"
            and not self._is_dead(name, sign)
        }


def _modified(url: Url) -> float:
    system, key = open_file_system(url)
    try:
        return float(system.modified(key).timestamp())
    except NotImplementedError:
        return float("inf")
    except FileNotFoundError:
        return 0.0
