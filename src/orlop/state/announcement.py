"""What a load tells the person in front of it, once for all ranks: a line of counts and a few names.

Owns those words. Must not know files, nor what is done about a finding.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from orlop.ranks import Ranks
from orlop.state.plain import digest
from orlop.state.report import Finding, Verdict
from orlop.wording import counted

__all__ = ["warn_of"]

_log = logging.getLogger("orlop")
_SHOWN = 5
# What a warning says of one leaf, of several, and of both.
_NOTABLE: tuple[tuple[Verdict, str, str, str], ...] = (
    ("absent", "parameter has", "parameters have", "no state in the checkpoint, so a fresh optimizer's"),
    ("fresh", "optimizer is", "optimizers are", "not there: the checkpoint holds weights only; fresh state"),
    ("kept", "leaf is", "leaves are", "not in the checkpoint, so live values stay"),
    ("reset", "parameter had", "parameters had", "damaged state, reset to a fresh optimizer's"),
    ("afresh", "part was", "parts were", "saved by another number of ranks: begun afresh, by the policy"),
    ("skipped", "part is", "parts are", "skipped, as the policy says: what is here stays"),
    ("merged", "parameter had", "parameters had", "other scalars on each rank: now the largest of them"),
)


def warn_of(findings: Sequence[Finding], strangers: Sequence[str], ranks: Ranks) -> None:
    """One warning for all ranks together; collective.

    Args:
        findings: This rank's.
        strangers: The parts of the checkpoint that nothing here takes; the same on every rank.
        ranks: Who shares it.
    """
    notable = {verdict: [f.leaf for f in findings if f.verdict == verdict] for verdict, *_ in _NOTABLE}
    if not ranks.equal(digest(notable)):
        # Pipeline stages have different parameters.
        everyone = ranks.gather(notable)
        notable = {
            verdict: list(dict.fromkeys(leaf for theirs in everyone for leaf in theirs[verdict]))
            for verdict in notable
        }
    texts = [
        f"{counted(len(leaves), one, many)} {text}: {', '.join(leaves[:_SHOWN])}"
        + (", …" if len(leaves) > _SHOWN else "")
        for verdict, one, many, text in _NOTABLE
        if (leaves := notable[verdict])
    ]
    if strangers:
        texts.append(
            f"parts of the checkpoint that nothing here takes stay there: {', '.join(strangers)} "
            "(give them to the engine, or leave them by LoadPolicy(skip_parts=...))"
        )
    if texts and ranks.is_coordinator:
        _log.warning("%s", "; ".join(texts))
