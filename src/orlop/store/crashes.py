"""What a crash between any two operations would leave on the disk, for tests: orlop's own and its users'.

Owns the record of a directory at every operation, and the model of a disk that loses what was not synced. Must not
know what the files hold.
"""

from __future__ import annotations

import fcntl
import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from orlop.store.operations import Observer, Operation

_END = "return"
# A tree of what a directory holds: relative path -> (identity of file or directory, content; None for a directory).
_Tree = dict[str, tuple[int, "bytes | None"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """What stands in a directory after a crash.

    Attributes:
        after: How many operations were done before.
        last: The last of them, in words.
        returned: Whether they were all, and the caller had been told so.
        kinds: Which kinds of crash leave this.
        tree: Content by relative path; None for a directory.
    """

    after: int
    last: str
    returned: bool
    kinds: tuple[str, ...]
    tree: dict[str, bytes | None]

    def build(self, directory: Path) -> None:
        """Makes `directory`, which must not be there, hold just this."""
        directory.mkdir(parents=True)
        for name, content in sorted(self.tree.items()):
            if content is None:
                (directory / name).mkdir()
            else:
                (directory / name).write_bytes(content)


class CrashLog:
    """Records a directory at every operation, and replays what a crash after each of them would leave.

    Several processes may record into one log, each with `observe`; their operations are put in one order. What was in
    the directory at the first operation counts as durable.

    Args:
        directory: What is watched; small, since it is copied at every operation.
        log: The file of the record, outside of `directory`.
    """

    def __init__(self, directory: Path, log: Path) -> None:
        self._directory = directory
        self._log = log

    @property
    def observe(self) -> Observer:
        """For `files.observed`: within that block this process's operations are recorded."""
        return lambda operation: self._record(f"{operation.kind} {operation.path.name}", operation)

    def finish(self) -> None:
        """Records how it ended: everything is done and has returned."""
        self._record(_END, None)

    def _record(self, words: str, operation: Operation | None) -> None:
        with self._log.open("ab") as log:
            fcntl.flock(log, fcntl.LOCK_EX)
            synced = None
            if operation is not None and operation.kind == "fsync":
                synced = os.path.relpath(operation.path, self._directory)
            pickle.dump((words, synced, _look(self._directory)), log)

    def crashes(self) -> Iterator[Crash]:
        """All that differ, in order: after no operation, after the first, ... after `finish`.

        The kinds: a killed process loses nothing; a power cut loses data that was not synced (it reads as empty, or
        as a half), and names that were not synced: in the watched directory, in those below it, in both, or in none.
        """
        disk = _Disk()
        before = "nothing"
        for after, (words, synced, tree) in enumerate(self._records()):
            for kinds, survivors in _distinct(disk.outcomes(tree)):
                yield Crash(after=after, last=before, returned=words == _END, kinds=kinds, tree=survivors)
            if synced is not None:
                disk.sync(synced)
            before = words

    def _records(self) -> Iterator[tuple[str, str | None, _Tree]]:
        with self._log.open("rb") as log:
            while True:
                try:
                    yield pickle.load(log)
                except EOFError:
                    return


def _look(directory: Path) -> _Tree:
    tree: _Tree = {".": (directory.stat().st_ino, None)} if directory.exists() else {}
    for path in sorted(directory.rglob("*")):
        try:
            content = None if path.is_dir() else path.read_bytes()
            tree[path.relative_to(directory).as_posix()] = (path.stat().st_ino, content)
        except FileNotFoundError:
            continue
    return tree


def _distinct(
    outcomes: dict[str, dict[str, bytes | None]],
) -> Iterator[tuple[tuple[str, ...], dict[str, bytes | None]]]:
    kinds: dict[tuple[tuple[str, bytes | None], ...], list[str]] = {}
    for kind, tree in outcomes.items():
        kinds.setdefault(tuple(sorted(tree.items())), []).append(kind)
    for items, names in kinds.items():
        yield tuple(names), dict(items)


class _Disk:
    """What is in the cache and what is on the platter."""

    def __init__(self) -> None:
        self._cached: _Tree = {}
        self._numbers: dict[int, int] = {}
        self._next = 0
        self._contents: dict[int, bytes] = {}
        self._names: dict[int, dict[str, int]] = {}
        self._directories: set[int] = set()

    def outcomes(self, tree: _Tree) -> dict[str, dict[str, bytes | None]]:
        """What a crash leaves, by its kind, when the cache holds `tree`."""
        first = not self._cached
        self._cached = self._identify(tree)
        if first:
            for path in self._cached:
                self.sync(path)
        found: dict[str, dict[str, bytes | None]] = {
            "kill": {path: content for path, (_, content) in self._cached.items() if path != "."}
        }
        for top in ("kept", "lost"):
            for below in ("kept", "lost"):
                for data in ("empty", "half"):
                    kind = f"power cut: names {top}, below {below}, data {data}"
                    found[kind] = self._survivors(top == "kept", below == "kept", data == "half")
        return found

    def sync(self, path: str) -> None:
        """A file's content, or a directory's names, reach the platter."""
        if path not in self._cached:
            return
        number, content = self._cached[path]
        if content is None:
            self._names[number] = self._cached_names(path)
        else:
            self._contents[number] = content

    def _identify(self, tree: _Tree) -> _Tree:
        """The same tree with numbers that, unlike inode numbers, are never used again."""
        gone = set(self._numbers) - {inode for inode, _ in tree.values()}
        for inode in gone:
            del self._numbers[inode]
        numbered: _Tree = {}
        for path, (inode, content) in tree.items():
            if inode not in self._numbers:
                self._numbers[inode] = self._next
                self._next += 1
            number = self._numbers[inode]
            numbered[path] = (number, content)
            if content is None:
                self._directories.add(number)
        return numbered

    def _cached_names(self, path: str) -> dict[str, int]:
        parent = "" if path == "." else f"{path}/"
        return {
            name.removeprefix(parent): number
            for name, (number, _) in self._cached.items()
            if name != "." and name.startswith(parent) and "/" not in name.removeprefix(parent)
        }

    def _survivors(self, top: bool, below: bool, half: bool) -> dict[str, bytes | None]:
        found: dict[str, bytes | None] = {}
        if "." in self._cached:
            cached = {number: (path, content) for path, (number, content) in self._cached.items()}
            self._descend(self._cached["."][0], "", (top, below, half), cached, found)
        return found

    def _descend(
        self,
        number: int,
        prefix: str,
        kept: tuple[bool, bool, bool],
        cached: dict[int, tuple[str, bytes | None]],
        found: dict[str, bytes | None],
    ) -> None:
        top, below, half = kept
        names = self._names.get(number, {})
        if (below if prefix else top) and number in cached:
            names = self._cached_names(cached[number][0])
        for name, child in names.items():
            if child in self._directories:
                found[prefix + name] = None
                self._descend(child, f"{prefix}{name}/", kept, cached, found)
                continue
            content = self._contents.get(child, b"")
            now = cached[child][1] if child in cached else None
            if half and now is not None and now != content:
                content = now[: len(now) // 2]
            found[prefix + name] = content
