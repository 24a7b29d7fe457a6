"""Where a drill looks for what a command left outside of its run directory, and what there is nobody's concern.

Paths are strings, absolute and free of symbolic links, as `/proc` has them. Must not know what is looked for.
"""

from __future__ import annotations

import glob
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path

__all__ = ["DRILL_MARKER", "Surroundings", "above", "find_surroundings", "from_here", "is_marked", "matches"]

DRILL_MARKER = ".orlop-drill"
# A directory that holds one of these says itself that it can be made anew, or that another drill is at work there.
_MARKERS = frozenset({"CACHEDIR.TAG", "pyvenv.cfg", DRILL_MARKER})
_NAMES = frozenset({"__pycache__", ".git"})
_SYSTEM = frozenset({"/dev", "/proc", "/sys"})
# What `tempfile`, `multiprocessing`, `torch.compile` and `torchrun` make in the temporary directory.
_TEMPORARY = ("tmp*", "pymp-*", "torchinductor_*", "torchelastic_*")


def _cache_homes() -> frozenset[str]:
    homes = ["~/.cache", "~/.triton", "~/.nv", os.environ.get("XDG_CACHE_HOME", "")]
    return frozenset(os.path.realpath(os.path.expanduser(home)) for home in homes if home)


def _temporary() -> str:
    return os.path.realpath(tempfile.gettempdir())


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Where to look.

    Attributes:
        directories: With all that stands in them.
        apart: Files and directories that are left out.
        caches: Likewise: the user's caches.
        temporary: The temporary directory, of which the usual litter is left out.
    """

    directories: tuple[str, ...]
    apart: frozenset[str] = frozenset()
    caches: frozenset[str] = field(default_factory=_cache_homes)
    temporary: str = field(default_factory=_temporary)

    def leaves_out(self, path: str) -> bool:
        """Whether a file or directory is left out, with all that is in it: by its name, or where it stands."""
        directory, name = os.path.split(path)
        if name in _NAMES or name.endswith(".pyc"):
            return True
        if path in self.apart or path in self.caches or path in _SYSTEM:
            return True
        return (
            directory == self.temporary
            and any(fnmatchcase(name, pattern) for pattern in _TEMPORARY)
            # Unless the training itself is at home there.
            and not any(place == path or place.startswith(f"{path}/") for place in self.directories)
        )

    def counts(self, path: str) -> bool:
        """Whether a file anywhere is somebody's concern."""
        if not self.apart.isdisjoint(above(path)):
            return False
        for each in (path, *above(path)):
            if each in self.directories:
                break
            if self.leaves_out(each) or is_marked(each):
                return False
        return True


def find_surroundings(command: Sequence[str], out: Path, apart: Sequence[Path]) -> Surroundings:
    """The current directory, the drill's own (`out`), and those of all files that the command's words name."""
    # Without a temporary directory at first: a script in a `/tmp/tmp1234` is at home there.
    found = Surroundings(
        directories=(os.getcwd(), os.path.realpath(out)),
        apart=frozenset(map(os.path.realpath, apart)),
        temporary="",
    )
    named = []
    for text in (text for word in command for text in (word, word.partition("=")[2])):
        path = os.path.abspath(os.path.expanduser(text))
        place = os.path.realpath(path if os.path.isdir(path) else os.path.dirname(path))
        # `python` is often one in a virtual environment: nothing of the training's is there.
        if os.path.exists(path) and place != "/" and found.counts(os.path.join(place, "any")):
            named.append(place)
    directories = tuple(dict.fromkeys([*found.directories, *named]))
    return replace(found, directories=directories, temporary=_temporary())


def is_marked(directory: str) -> bool:
    """Whether a directory says itself that nothing in it matters."""
    return any(os.path.lexists(os.path.join(directory, marker)) for marker in _MARKERS)


def above(path: str) -> Iterator[str]:
    """The directories above, the nearest first."""
    while (parent := os.path.dirname(path)) != path:
        yield (path := parent)


def from_here(path: str) -> str:
    """A path as it is told: from the current directory where it is below that."""
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if here in Path(path).parents else path


def matches(path: str, patterns: Sequence[str]) -> bool:
    """Whether a file, or a directory above it, matches a glob, which is absolute or from the current directory."""
    here = glob.escape(os.getcwd())
    whole = [os.path.normpath(os.path.join(here, os.path.expanduser(pattern))) for pattern in patterns]
    return any(fnmatchcase(each, pattern) for pattern in whole for each in (path, *above(path)))
