"""What a command left outside of its run directory: files that are new, changed or gone.

Looks before a run and after it, and at what its processes were seen to write. Must not know what comes of a finding.
"""

from __future__ import annotations

import glob
import os
import stat
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice

from orlop.tools.drill.processes import find_all, find_tree, open_for_writing
from orlop.tools.drill.surroundings import Surroundings, above, from_here, is_marked, matches

__all__ = ["LIMIT", "Lookout", "OpenFiles", "Snapshot", "find_changes", "take_snapshot"]

LIMIT = 200_000  # entries of one snapshot: a few seconds, and some tens of MB
_LOOK_SECONDS = 0.02
LOOK_PAUSES = 20.0  # for each second of looking, so many without
_RENAMED_LIMIT = 10_000
# File systems stamp with a clock of their own: a coarser one, or a server's.
_CLOCK_SLACK_NS = 1_000_000_000

# Size, time of the last change, inode.
Mark = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What stood around a run at one time.

    Attributes:
        files: Regular files and symbolic links, by path.
        directories: All that were seen, and whether their entries were looked at.
        is_whole: Whether no directory was passed over because there were too many entries.
    """

    files: Mapping[str, Mark]
    directories: Mapping[str, bool]
    is_whole: bool = True


def find_changes(before: Snapshot, after: Snapshot) -> set[str]:
    """The files that are new, changed or gone, as far as both snapshots have looked."""
    kept = {path for path, mark in after.files.items() if before.files.get(path) == mark}
    return {path for path in after.files.keys() - kept if _was_looked_at(path, before)} | {
        path for path in before.files.keys() - after.files.keys() if _was_looked_at(path, after)
    }


def _was_looked_at(path: str, snapshot: Snapshot) -> bool:
    """Whether the file would be known, had it been there: the nearest directory that was there decides."""
    return next((snapshot.directories[each] for each in above(path) if each in snapshot.directories), False)


def take_snapshot(surroundings: Surroundings, limit: int) -> Snapshot:
    """Looks at all files around a run, the nearest first; symbolic links are not followed.

    Args:
        surroundings: Where.
        limit: A directory with whose entries there would be more than that is passed over.
    """
    marks: dict[str, Mark] = {}
    directories: dict[str, bool] = {}
    rest, is_whole = limit, True
    queue = deque(surroundings.directories)
    while queue:
        directory = queue.popleft()
        if directories.get(directory):  # it stands in another one
            continue
        directories[directory] = False
        if directory not in surroundings.directories and is_marked(directory):
            continue
        try:
            with os.scandir(directory) as found:
                entries = list(islice(found, rest + 1))
        except OSError:
            continue
        if len(entries) > rest:
            is_whole = False
            continue
        directories[directory], rest = True, rest - len(entries)
        for entry in entries:
            if surroundings.leaves_out(entry.path):
                continue
            if entry.is_dir(follow_symlinks=False):
                directories.setdefault(entry.path, False)
                queue.append(entry.path)
            elif (mark := _mark(entry.path)) is not None:
                marks[entry.path] = mark
    return Snapshot(files=marks, directories=directories, is_whole=is_whole)


def _mark(path: str) -> Mark | None:
    """None of what is gone, and of what keeps nothing (a socket)."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    is_kept = stat.S_ISREG(found.st_mode) or stat.S_ISLNK(found.st_mode)
    return (found.st_size, found.st_mtime_ns, found.st_ino) if is_kept else None


class OpenFiles:
    """What the processes of a run hold open for writing, looked at again and again while it goes on.

    Attributes:
        inodes: By path, of all that were seen.
    """

    def __init__(self) -> None:
        self.inodes: dict[str, int] = {}
        self._due = 0.0

    def look(self, root: int) -> None:
        """Looks at the tree of a process, where it is time to: it takes a small part of it, however large the tree."""
        start = time.monotonic()
        if start < self._due:
            return
        for process in find_tree(root):
            self.inodes.update(open_for_writing(process))
        end = time.monotonic()
        self._due = end + max(_LOOK_SECONDS, LOOK_PAUSES * (end - start))


class Lookout:
    """Looks around before a run starts, and says after its end what it left outside of its directory.

    Args:
        surroundings: Where to look; the run's own files are apart from it.

    Attributes:
        is_whole: Whether all that stands there was looked at.
    """

    def __init__(self, surroundings: Surroundings) -> None:
        self._surroundings = surroundings
        # The output of the drill itself, a `tee` of it, logs of other jobs.
        self._of_others = {path for process in find_all() for path in open_for_writing(process)}
        self._began = time.time_ns()
        self._before = take_snapshot(surroundings, LIMIT)
        self.is_whole = self._before.is_whole

    def find(self, held: Mapping[str, int]) -> list[str]:
        """The files that the run has left, sorted.

        Args:
            held: What its processes were seen to hold open for writing, wherever it is: inodes by path.
        """
        after = take_snapshot(self._surroundings, LIMIT)
        self.is_whole &= after.is_whole
        counted = {path: inode for path, inode in held.items() if self._surroundings.counts(path)}
        written = {path for path in {*counted, *self._renamed(counted)} if self._was_written(path)}
        return sorted((find_changes(self._before, after) | written) - self._of_others)

    def patterns(self, paths: Iterable[str]) -> list[str]:
        """Globs of which each file matches one, also where a run gives new directories names of its own (a time)."""
        found: list[str] = []
        for path in paths:
            if not matches(path, found):
                found.append(self._pattern(path))
        return found

    def _pattern(self, path: str) -> str:
        """The topmost directory that is new, or all in what holds it, unless that is a place where the drill looks."""
        known, top = self._before.directories, path
        for directory in above(path):
            if directory in known:
                is_new = top != path and known[directory]
                if is_new and directory not in self._surroundings.directories:
                    return f"{glob.escape(from_here(directory))}/*"
                return glob.escape(from_here(top if is_new else path))
            top = directory
        return glob.escape(from_here(path))

    def _renamed(self, held: Mapping[str, int]) -> set[str]:
        """What the files that are gone may be now: they, or their directories, were given other names.

        It is the same inode, or, of a file that is written anew again and again, what its name begins with.
        """
        gone: defaultdict[str, dict[str, int]] = defaultdict(dict)
        for path, inode in held.items():
            if not os.path.lexists(path):
                gone[next(each for each in above(path) if os.path.isdir(each))][path] = inode
        found = set()
        for directory, sought in gone.items():
            around = replace(self._surroundings, directories=(directory,))
            for path, mark in take_snapshot(around, _RENAMED_LIMIT).files.items():
                if mark[2] in sought.values() or any(each.startswith(path) for each in sought):
                    found.add(path)
        return found

    def _was_written(self, path: str) -> bool:
        """Whether a file still stands, and was written since: one that is open for it, or mapped, often never is."""
        mark = _mark(path)
        return mark is not None and mark[1] >= self._began - _CLOCK_SLACK_NS
