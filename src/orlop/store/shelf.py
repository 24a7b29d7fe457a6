"""Which of a run's checkpoints is taken, which gives way, which has expired: the coordinator's decisions.

Owns what is done with the checkpoints of a `Root` before a resume and around a save. Must not know what a checkpoint
holds, nor of other ranks. Decides by what stands there, and by what a load of this process has found damaged.
"""

from __future__ import annotations

import logging

from orlop.errors import CheckpointNotFound
from orlop.store import catalog, publish
from orlop.store.listing import Checkpoint
from orlop.store.roots import Root

_log = logging.getLogger(__name__)


class Shelf:
    """The checkpoints of one run.

    Args:
        root: Where they stand.
        keep_last: How many of the newest complete ones stay; None keeps all.
        keep_every: Those at multiples of this step stay for good.

    Attributes:
        damaged: Names of checkpoints that are complete by their structure, but that a load found damaged. They are
            not counted as complete ones, and give way when training comes to their step again.
    """

    def __init__(self, root: Root, *, keep_last: int | None, keep_every: int | None) -> None:
        self.root = root
        self.damaged: set[str] = set()
        self._keep_last = keep_last
        self._keep_every = keep_every

    def newest(self, passed_over: set[str]) -> Checkpoint | None:
        """The newest complete checkpoint; each one that is passed over is warned of once.

        Args:
            passed_over: Names that are not taken; those that are passed over here are added.

        Raises:
            CheckpointError: A newer orlop wrote the newest one: to go on from an older one would lose progress.
        """
        for found in reversed(self.root.checkpoints()):
            if found.name in passed_over:
                continue
            if found.fault is None:
                return found
            if not found.skippable:
                raise found.fault
            passed_over.add(found.name)
            _log.warning("passed over %s: %s", found.name, found.fault.found)
        return None

    def at(self, step: int) -> Checkpoint:
        """The complete checkpoint of a step.

        Raises:
            CheckpointNotFound: There is none.
            CheckpointError: It is not complete, or can't be read.
        """
        checkpoints = self.root.checkpoints()
        for found in checkpoints:
            if found.step == step:
                if found.fault is not None:
                    raise found.fault
                return found
        steps = [found.step for found in checkpoints if found.fault is None]
        raise CheckpointNotFound(
            f"There is no checkpoint of step {step}.",
            where=str(self.root.path(catalog.step_name(step))),
            found=f"steps {steps}" if steps else "no complete checkpoint",
            todo="choose a step that is there (`orlop ls` lists them)",
        )

    def make_room(self, step: int) -> None:
        """Removes what dead writers left, and frees the step's name where no usable checkpoint has it.

        Raises:
            CheckpointExists: A checkpoint has it.
        """
        self.root.sweep()
        for found in self.root.checkpoints():
            if found.step != step:
                continue
            damaged = found.name in self.damaged
            if not (found.skippable or damaged):
                raise publish.exists_error(found.path)
            # A resume passed over it, so training comes to this step again and must be able to save it.
            became = self.root.set_aside(found, "damaged" if damaged else "incomplete")
            self.damaged.discard(found.name)
            _log.warning("%s could not be resumed from; it is %s", found.name, became)

    def expire(self, published: int) -> None:
        """Lets old checkpoints go, if `published` stands whole; none that is being read."""
        try:
            whole = {
                found.step: found
                for found in self.root.checkpoints()
                if found.fault is None and found.name not in self.damaged
            }
            if published not in whole:
                _log.warning("step %d does not verify after its save; nothing expires", published)
                return
            busy = self.root.being_read()
            for step in catalog.expired(
                whole.keys(), published=published, keep_last=self._keep_last, keep_every=self._keep_every
            ):
                if whole[step].name in busy:
                    _log.info("%s is being read; it expires later", whole[step].name)
                else:
                    self.root.retire(whole[step])
        except Exception as error:
            # The new checkpoint stands: training must not end over an old one that could not be removed. And this is
            # the coordinator alone: what it raised here, the other ranks would wait for.
            _log.warning("could not remove an expired checkpoint: %s", error)
