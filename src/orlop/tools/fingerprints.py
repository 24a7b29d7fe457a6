"""The fingerprint of an engine's state, or of what a checkpoint holds: equal for equal state.

Of a checkpoint, every leaf is loaded as a resume would load it, one at a time. Needs torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from orlop.arguments import require_engine
from orlop.errors import CheckpointError
from orlop.ranks import Ranks
from orlop.state import fingerprint as of_engine
from orlop.state.agreement import Collected
from orlop.state.fingerprint import Fingerprint, fingerprint_leaves
from orlop.state.parts import Live
from orlop.tools.findings import Finding, from_error
from orlop.tools.opened import Opened
from orlop.tools.stored_values import StoredValues

__all__ = ["fingerprint", "stored_fingerprint"]


class _Leaves(Mapping[str, Any]):
    """A checkpoint's leaves, each loaded when it is looked at; those that can't be are noted and left out.

    Args:
        values: What loads them.
        findings: Where faults go; None raises them instead.
    """

    def __init__(self, values: StoredValues, findings: list[Finding] | None) -> None:
        self._values = values
        self._findings = findings
        manifest = values.opened.manifest
        # Tied leaves are one value under several keys; a fingerprint counts it once.
        aliases = set() if manifest is None else {f"model.{name}" for name in manifest.aliases}
        self._names = [leaf for leaf in values.catalog.leaves if leaf not in aliases]

    def __getitem__(self, leaf: str) -> Any:
        entry = self._values.catalog.leaves[leaf]
        return self._values.value(leaf) if entry is None else self._values.tensor(leaf)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def items(self) -> Iterator[tuple[str, Any]]:  # type: ignore[override]
        """One after the other, so that no two are in memory."""
        for leaf in self:
            try:
                value = self[leaf]
            except CheckpointError as error:
                if self._findings is None:
                    raise
                self._findings.append(from_error(error, leaf))
                continue
            yield leaf, value


def fingerprint(source: Live | str | os.PathLike[str]) -> Fingerprint:
    """The fingerprint of state: equal state gives equal digests, however it is sharded.

    Hyperparameters count, those that choose a kernel (`foreach`, `fused`) and names of parameters too. Of a checkpoint
    the keys count as they stand there: it has its engine's fingerprint where it was saved as `save_dcp` does by itself,
    and another with a `key_prefix`, the flattened layout, or initial values for absent state.

    Args:
        source: An engine (then it is collective, and changes nothing), or a checkpoint's path (then it is not).

    Raises:
        CheckpointError: A leaf of the checkpoint can't be loaded.
    """
    if isinstance(source, (str, os.PathLike)):
        return stored_fingerprint(source)
    require_engine(source)
    return of_engine.fingerprint(source)


def stored_fingerprint(path: str | os.PathLike[str], findings: list[Finding] | None = None) -> Fingerprint:
    """The fingerprint of a checkpoint, as the engine that saved it had it.

    Args:
        path: The checkpoint.
        findings: Where it is noted which leaves can't be loaded; None raises instead.

    Raises:
        CheckpointError: A leaf can't be loaded.
    """
    leaves = _Leaves(StoredValues(Opened(path)), findings)
    return fingerprint_leaves(Collected(leaves=leaves), Ranks.create())  # type: ignore[arg-type]
