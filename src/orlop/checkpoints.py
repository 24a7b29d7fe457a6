"""A run's directory of checkpoints: save the next one, resume from the newest complete one, let old ones go.

Owns the choice of checkpoint and what happens around a save. Must not know what a checkpoint holds (`save`,
`resume`) nor how it reaches the disk (`store`). Only the coordinator lists and removes, and tells the others
its choice: another node may see another listing of the same directory.
"""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from orlop.arguments import require_count, require_engine, require_flags, require_path
from orlop.dcp.contents import METADATA_NAME
from orlop.dcp.places import no_run
from orlop.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointIncomplete,
    StateNotReady,
)
from orlop.resume import LoadPolicy, LoadReport, resume_checkpoint
from orlop.save import save_checkpoint
from orlop.state.policy import require_options
from orlop.store import catalog
from orlop.store.listing import Checkpoint
from orlop.store.manifest import MANIFEST_NAME
from orlop.store.objects import Url, directory_at, locate
from orlop.store.roots import root_at
from orlop.store.shelf import Shelf
from orlop.tools.check import require_sound

if TYPE_CHECKING:
    from orlop.engine import TrainEngine

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """What a resume took.

    Attributes:
        step: The step that the checkpoint was saved at.
        path: Its directory.
        report: What the load found and did.
    """

    step: int
    path: Path | Url
    report: LoadReport


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """The checkpoint that all ranks load."""

    step: int
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    """What to fill, and how."""

    engine: TrainEngine
    load_states: bool
    load_args: bool
    policy: LoadPolicy

    def after_failure(self) -> _Load:
        """The next try. Where a load broke off half-way, no live value may be kept: it may be the damaged one's."""
        try:
            self.engine.require_ready()
        except StateNotReady:
            return replace(self, policy=replace(self.policy, allow_missing=False))
        return self


def _chosen(found: Checkpoint) -> _Choice:
    return _Choice(step=found.step, name=found.name)


class CheckpointStore:
    """The checkpoints of one run, as `root/step-00000100/`.

    Args:
        root: The run's directory, created by the first save, or its address in an object store (`s3://bucket/run`, by
            fsspec). It may hold other things, which are left alone.
        keep_last: How many of the newest complete checkpoints stay; None keeps all.
        keep_every: Checkpoints at multiples of this step stay for good.

    Raises:
        TypeError: `root` is no path, or a number no int.
        ValueError: `keep_last` or `keep_every` is less than one.
    """

    def __init__(
        self, root: str | os.PathLike[str], keep_last: int | None = 3, keep_every: int | None = None
    ) -> None:
        require_path("root", root)
        require_count("keep_last", keep_last, 1, optional=True)
        require_count("keep_every", keep_every, 1, optional=True)
        self.root = locate(root)
        self.keep_last = keep_last
        self.keep_every = keep_every
        self._shelf = Shelf(root_at(self.root), keep_last=keep_last, keep_every=keep_every)

    def path(self, step: int) -> Path | Url:
        """The directory (or prefix) that a save at `step` makes."""
        return self.root / catalog.step_name(step)

    def steps(self) -> list[int]:
        """The steps with a complete checkpoint, ascending, as this process sees the directory."""
        return [found.step for found in self._shelf.root.checkpoints() if found.fault is None]

    def save(self, engine: TrainEngine, step: int, *, fingerprint: bool = False) -> Path | Url:
        """Saves all of the engine's parts as the checkpoint of `step`; collective.

        The checkpoint appears whole or not at all. Then, and only then, older ones expire.

        Args:
            engine: What to save.
            step: The number of optimizer steps behind this state.
            fingerprint: Whether the manifest shall hold a digest of every leaf.

        Returns:
            The checkpoint's directory.

        Raises:
            CheckpointExists: That step has a checkpoint; it is left as it is.
            RootNotShared: A rank doesn't see what the coordinator made in `root`.
            StorageFull: There is not enough space; nothing was removed or written.
            OrlopError: On every rank, when any rank failed; nothing is published.
        """
        require_engine(engine)
        with engine.ranks.asked("save a checkpoint"):
            require_count("step", step)
            require_flags(fingerprint=fingerprint)
            path = self.path(step)
        engine.ranks.on_coordinator(f"make room for {path.name}", lambda: self._make_room(step))
        save_checkpoint(engine, path, step=step, fingerprint=fingerprint)
        if engine.ranks.is_coordinator:
            self._shelf.expire(step)
        return path

    def resume(
        self,
        engine: TrainEngine,
        *,
        step: int | None = None,
        load_states: bool = True,
        load_args: bool = True,
        policy: LoadPolicy | None = None,
    ) -> Resumed | None:
        """Loads the newest checkpoint that verifies, or that of `step`, into the engine; collective.

        One that is not complete, or that turns out to be damaged while it is read, is passed over with a warning
        that says why, and the next older one is taken. While a checkpoint is being read, no save expires it.

        Args:
            engine: What to fill, in place.
            step: Which checkpoint; None for the newest one that verifies.
            load_states: False gives every parameter a fresh optimizer's state.
            load_args: False keeps the live hyperparameters of every group.
            policy: What the load may tolerate; by default, nothing.

        Returns:
            What was loaded; None when the run has no complete checkpoint yet (a fresh start, logged).

        Raises:
            CheckpointNotFound: `step` was asked for, and there is none.
            CheckpointIncomplete: `step` was asked for, and it is not complete; or no checkpoint could be loaded.
            CheckpointCorrupt: Likewise, for one that is damaged.
            CheckpointMismatch: The newest one doesn't fit the live objects, or holds weights only; an older one is not
                tried instead.
        """
        require_engine(engine)
        with engine.ranks.asked("resume"):
            require_count("step", step, optional=True)
            require_options(policy=policy, load_states=load_states, load_args=load_args)
        engine.ranks.require_alike("resume", {"step": step})
        load = _Load(
            engine=engine, load_states=load_states, load_args=load_args, policy=policy or LoadPolicy()
        )
        if step is not None:
            chosen, newer = engine.ranks.on_coordinator(
                "choose a checkpoint", lambda: (_chosen(self._shelf.at(step)), self._newer(step))
            )
            resumed = self._load(load, chosen)
            if engine.ranks.is_coordinator and newer:
                self._warn_of_newer(step, newer)
            return resumed
        return self._load_newest(load)

    def _load_newest(self, load: _Load) -> Resumed | None:
        passed_over: set[str] = set()
        newest_error: CheckpointError | None = None
        while True:
            # Listed anew each time: a newer checkpoint may have been published meanwhile, or one expired.
            chosen = load.engine.ranks.on_coordinator(
                "choose a checkpoint", lambda: self._newest(passed_over)
            )
            if chosen is None and newest_error is not None:
                # Complete checkpoints are there and none loads: to start afresh would hide it.
                raise newest_error
            if chosen is None:
                if load.engine.ranks.is_coordinator:
                    found = f", though {len(passed_over)} that are not" if passed_over else ""
                    level = logging.WARNING if passed_over else logging.INFO
                    _log.log(level, "fresh start: no complete checkpoint in %s%s", self.root, found)
                return None
            try:
                return self._load(load, chosen)
            except (CheckpointIncomplete, CheckpointCorrupt) as error:
                newest_error = newest_error or error
                passed_over.add(chosen.name)
                if load.engine.ranks.is_coordinator:
                    _log.warning("passed over %s: %s", chosen.name, " ".join(str(error).split()))
                load = load.after_failure()

    def _newer(self, step: int) -> list[int]:
        return [later for later in self.steps() if later > step]

    def _warn_of_newer(self, step: int, newer: list[int]) -> None:
        """Going back leaves what came after: it is not removed for you, and it is in the way."""
        _log.warning(
            "went back to step %d, and %s has newer checkpoints (%s): an automatic resume takes the newest of them, "
            "they count for keep_last, and saving one of their steps again is refused; to go on from here, move them "
            "away or save to another run directory",
            step,
            self.root,
            ", ".join(map(str, newer)),
        )

    def _make_room(self, step: int) -> None:
        self._require_run()
        self._shelf.make_room(step)

    def _require_run(self) -> None:
        """A run that began inside a checkpoint would start at step 0, and look like a part of that checkpoint."""
        inside = directory_at(self.root)
        if any(inside.exists(name) for name in (METADATA_NAME, MANIFEST_NAME)):
            raise no_run(self.root)

    def _newest(self, passed_over: set[str]) -> _Choice | None:
        self._require_run()
        found = self._shelf.newest(passed_over)
        return None if found is None else _chosen(found)

    def _load(self, load: _Load, chosen: _Choice) -> Resumed:
        path = self.root / chosen.name
        shown = (
            self._shelf.root.reading(chosen.name)
            if load.engine.ranks.is_coordinator
            else contextlib.nullcontext()
        )
        try:
            with shown:
                if load.policy.verify_first:
                    load.engine.ranks.on_coordinator(f"verify {chosen.name}", lambda: require_sound(path))
                report = resume_checkpoint(
                    load.engine,
                    path,
                    load_states=load.load_states,
                    load_args=load.load_args,
                    policy=load.policy,
                    is_auto=True,
                )
        except (CheckpointIncomplete, CheckpointCorrupt):
            self._shelf.damaged.add(chosen.name)
            raise
        self._shelf.damaged.discard(chosen.name)
        return Resumed(step=chosen.step, path=path, report=report)
