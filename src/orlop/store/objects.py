"""One checkpoint's objects in an object store, as its reader and writer see them; by fsspec.

Owns `Url`, and the remote twin of `LocalDirectory`. Must not know what the objects hold, nor which of them make a
checkpoint complete (`remote`).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from orlop.store.directory import Directory, LocalDirectory, NewData, RangedData

__all__ = ["RemoteDirectory", "Url", "directory_at", "locate"]

# What an upload holds in memory at a time; 10,000 parts of it, S3's most, are 156 GiB in one object.
_PART_BYTES = 16 * 2**20
_BROKEN_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


class Url(str):
    """The address of something in an object store, `scheme://...`; joined by `/` like a path."""

    __slots__ = ()

    def __truediv__(self, name: str) -> Url:
        return Url(f"{self}/{name}")

    @property
    def name(self) -> str:
        """What stands behind the last `/`."""
        return self.rpartition("/")[2]

    @property
    def parent(self) -> Url:
        """What stands before it."""
        return Url(self.rpartition("/")[0])


def locate(path: str | os.PathLike[str]) -> Path | Url:
    """A path of this machine, or the address of an object store; `file://` is the former.

    Raises:
        ValueError: An address in a `Path`, which makes one slash of two.
    """
    text = os.fspath(path)
    if not isinstance(path, str) and _BROKEN_URL.match(text):
        raise ValueError(f"{text} was an address before it became a Path; give it as a string")
    if "://" not in text:
        return Path(text)
    scheme, _, rest = text.partition("://")
    return Path(rest) if scheme in ("file", "local") else Url(text.rstrip("/"))


def directory_at(path: str | os.PathLike[str]) -> Directory:
    """The files of the checkpoint at `path`, wherever that is."""
    location = locate(path)
    return RemoteDirectory(location) if isinstance(location, Url) else LocalDirectory(location)


def open_file_system(url: Url) -> tuple[Any, str]:
    """The fsspec file system of an address, and the address as it names things.

    Raises:
        ImportError: The package for that scheme is not installed.
    """
    # Imported here: who stays on local disks doesn't wait for it.
    from fsspec.core import url_to_fs

    try:
        # A listing that was cached would hide what another process has written since.
        found: tuple[Any, str] = url_to_fs(str(url), use_listings_cache=False)
    except ImportError as error:
        extra = "s3" if url.startswith("s3:") else None
        hint = f"pip install 'orlop[{extra}]'" if extra else "install the fsspec package for it"
        raise ImportError(f"{url} needs a package that is not installed: {hint}") from error
    return found[0], found[1].rstrip("/")


class RemoteDirectory:
    """The objects under one prefix.

    Args:
        url: The prefix.
    """

    def __init__(self, url: Url) -> None:
        self.url = url
        self._system, self._prefix = open_file_system(url)

    def __str__(self) -> str:
        return str(self.url)

    def exists(self, name: str) -> bool:
        """Whether there is such an object; the empty name means any object at all."""
        return bool(self.sizes()) if not name else bool(self._system.exists(self._key(name)))

    def read(self, name: str) -> bytes:
        """A small object's content; raises FileNotFoundError."""
        return bytes(self._system.cat_file(self._key(name)))

    def open(self, name: str) -> RangedData:
        """A large object, for ranges; raises FileNotFoundError."""
        key = self._key(name)
        return _RangedObject(self._system, key, int(self._system.info(key)["size"]))

    @contextmanager
    def create(self, name: str) -> Iterator[NewData]:
        """A new object, in place of what that name held; it is there when the block has ended well."""
        stream = self._system.open(self._key(name), "wb", block_size=_PART_BYTES)
        try:
            yield _NewObject(stream)
        except BaseException:
            # What stays of it is no part of any checkpoint; this only gives back the parts already sent, and keeps
            # the stream from sending the rest when it is collected.
            with contextlib.suppress(Exception):
                stream.discard()
                stream.closed = True
            with contextlib.suppress(Exception):
                self.remove(name)
            raise
        stream.close()

    def replace(self, name: str, data: bytes) -> None:
        """Gives a small object its content in one put."""
        self._system.pipe_file(self._key(name), data)

    def make(self) -> None:
        """Nothing: a prefix is there as soon as it holds an object."""

    def path_of(self, name: str) -> str:
        """An object's address, for messages."""
        return str(self.url / name)

    def sizes(self) -> dict[str, int]:
        """Bytes of every object, by its name relative to the prefix."""
        try:
            found = self._system.find(self._prefix, detail=True)
        except FileNotFoundError:
            return {}
        cut = len(self._prefix) + 1
        return {key[cut:]: int(info["size"]) for key, info in sorted(found.items()) if len(key) > cut}

    def remove(self, name: str) -> None:
        """Removes an object; one that is gone already is no error."""
        with contextlib.suppress(FileNotFoundError):
            self._system.rm_file(self._key(name))

    def last_change(self) -> float:
        """When the newest object was written, in seconds since the epoch; infinity when that can't be told."""
        try:
            return float(max(self._system.modified(self._key(name)).timestamp() for name in self.sizes()))
        except (ValueError, NotImplementedError, FileNotFoundError):
            return float("inf")

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}" if name else self._prefix


class _RangedObject:
    """An object, read range by range; each range is one request."""

    def __init__(self, system: Any, key: str, size: int) -> None:
        self._system = system
        self._key = key
        self.size = size

    def read(self, offset: int, nbytes: int) -> bytes:
        """Bytes from `offset` on; fewer only where the object ends."""
        end = min(offset + nbytes, self.size)
        return bytes(self._system.cat_file(self._key, start=offset, end=end)) if offset < end else b""

    def read_into(self, offset: int, buffers: list[memoryview]) -> int:
        """Fills the buffers with the bytes from `offset` on; returns how many there were."""
        content = memoryview(self.read(offset, sum(map(len, buffers))))
        rest = content
        for buffer in buffers:
            part = rest[: len(buffer)]
            buffer[: len(part)] = part
            rest = rest[len(part) :]
        return len(content)

    def expect_all(self) -> None:
        """Nothing: each range is a request of its own."""

    def close(self) -> None:
        """Nothing: no connection is held."""


class _NewObject:
    """An upload."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Adds all of `data`, part by part: the upload keeps a copy of what was not sent yet."""
        rest = memoryview(data).cast("B")
        while rest:
            self._stream.write(rest[:_PART_BYTES])
            rest = rest[_PART_BYTES:]

    def fsync(self) -> None:
        """Nothing: an object is durable when its upload has ended."""
