"""A run's directory of checkpoints: save the next one, resume from the newest complete one, let old ones go.

Owns the choice of checkpoint and what happens around a save. Must not know what a checkpoint holds (`save`,
`resume`) nor how it reaches the disk (`store`). Only the coordinator lists and removes, and tells the others
its choice: another node may see another listing of the same directory.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orlop.errors import CheckpointNotFound
from orlop.resume import LoadPolicy, LoadReport, resume_checkpoint
from orlop.save import save_checkpoint
from orlop.store import catalog, files, publish
from orlop.store.listing import Checkpoint, list_checkpoints

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
    path: Path
    report: LoadReport


class CheckpointStore:
    """The checkpoints of one run, as `root/step-00000100/`.

    Args:
        root: The run's directory; created by the first save. It may hold other things, which are left alone.
        keep_last: How many of the newest complete checkpoints stay; None keeps all.
        keep_every: Checkpoints at multiples of this step stay for good.

    Raises:
        ValueError: `keep_last` or `keep_every` is less than one.
    """

    def __init__(
        self, root: str | os.PathLike[str], keep_last: int | None = 3, keep_every: int | None = None
    ) -> None:
        for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, or None; it is {value}")
        self.root = Path(root)
        self.keep_last = keep_last
        self.keep_every = keep_every

    def path(self, step: int) -> Path:
        """The directory that a save at `step` makes."""
        return self.root / catalog.step_name(step)

    def steps(self) -> list[int]:
        """The steps with a complete checkpoint, ascending, as this process sees the directory."""
        return [found.step for found in list_checkpoints(self.root) if found.fault is None]

    def save(self, engine: TrainEngine, step: int, *, fingerprint: bool = False) -> Path:
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
            OrlopError: On every rank, when any rank failed; nothing is published.
        """
        path = self.path(step)
        engine.ranks.on_coordinator(f"make room for {path.name}", lambda: self._make_room(step))
        save_checkpoint(engine, path, step=step, fingerprint=fingerprint)
        if engine.ranks.is_coordinator:
            self._expire(step)
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
        """Loads the newest complete checkpoint, or that of `step`, into the engine; collective.

        Args:
            engine: What to fill, in place.
            step: Which checkpoint; None for the newest complete one. Incomplete ones are passed over, each
                with a warning that says why.
            load_states: False gives every parameter a fresh optimizer's state.
            load_args: False keeps the live hyperparameters of every group.
            policy: What the load may tolerate; by default, nothing.

        Returns:
            What was loaded; None when the run has no complete checkpoint yet (a fresh start, logged).

        Raises:
            CheckpointNotFound: `step` was asked for, and there is none.
            CheckpointIncomplete: `step` was asked for, and it is not complete.
            CheckpointError: What is there can't be loaded; the live state is as it was.
        """
        chosen = engine.ranks.on_coordinator("choose a checkpoint", lambda: self._choose(step))
        if chosen is None:
            return None
        chosen_step, name = chosen
        path = self.root / name
        report = resume_checkpoint(
            engine, path, load_states=load_states, load_args=load_args, policy=policy or LoadPolicy()
        )
        return Resumed(step=chosen_step, path=path, report=report)

    def _choose(self, step: int | None) -> tuple[int, str] | None:
        found = self._newest() if step is None else self._at(step)
        return None if found is None else (found.step, found.path.name)

    def _newest(self) -> Checkpoint | None:
        for found in reversed(list_checkpoints(self.root)):
            if found.fault is None:
                return found
            if not found.skippable:
                # Written by a newer orlop: to go on from an older one would lose progress without a word.
                raise found.fault
            _log.warning("skipped %s: %s", found.path.name, found.fault.found)
        _log.info("fresh start: no complete checkpoint in %s", self.root)
        return None

    def _at(self, step: int) -> Checkpoint:
        checkpoints = list_checkpoints(self.root)
        for found in checkpoints:
            if found.step == step:
                if found.fault is not None:
                    raise found.fault
                return found
        steps = [found.step for found in checkpoints if found.fault is None]
        raise CheckpointNotFound(
            f"There is no checkpoint of step {step}.",
            where=str(self.path(step)),
            found=f"steps {steps}" if steps else "no complete checkpoint",
            todo="choose a step that is there (`orlop ls` lists them)",
        )

    def _make_room(self, step: int) -> None:
        for stray in publish.find_strays(self.root):
            if self._is_ours(stray):
                _log.info("removing %s, left by a process that is dead", stray.name)
                files.remove_tree(stray)
        for found in list_checkpoints(self.root):
            if found.step != step:
                continue
            if not found.skippable:
                raise publish.exists_error(found.path)
            # A resume passed over it, so training comes to this step again and must be able to save it.
            aside = publish.set_aside(found.path)
            _log.warning("%s was not complete; it is now %s", found.path.name, aside.name)

    def _is_ours(self, path: Path) -> bool:
        unpublished = catalog.parse_unpublished(path.name)
        return unpublished is not None and catalog.parse_step(unpublished.final) is not None

    def _expire(self, published: int) -> None:
        try:
            checkpoints = {found.step: found for found in list_checkpoints(self.root) if found.fault is None}
            for step in catalog.expired(
                checkpoints.keys(), published=published, keep_last=self.keep_last, keep_every=self.keep_every
            ):
                publish.retire(checkpoints[step].path)
        except OSError as error:
            # The new checkpoint stands: training must not end over an old one that could not be removed.
            _log.warning("could not remove an expired checkpoint in %s: %s", self.root, error)
