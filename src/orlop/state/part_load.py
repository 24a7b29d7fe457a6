"""The plain parts of one load: which are there, whether each can take its state, and handing it over.

Owns the verdicts on scheduler, data, random streams and whatever else an engine was given, and on what the checkpoint
has besides. Must not know files, nor talk to other ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from orlop import compat
from orlop.errors import CheckpointMismatch
from orlop.ranks import Ranks
from orlop.state.absence import Stored
from orlop.state.agreement import part_slots
from orlop.state.containers import like_live, number_states
from orlop.state.groups import path_below
from orlop.state.part_fit import find_misfit
from orlop.state.parts import Live, is_per_rank, plain_parts
from orlop.state.policy import OWN_PARTS, Options
from orlop.state.report import Finding, Verdict
from orlop.store.manifest import Manifest
from orlop.wording import counted

__all__ = ["PartsLoad"]

_SHOWN = 5


@dataclass(slots=True, kw_only=True)
class PartsLoad:
    """The plain parts of one load, seen from this rank.

    Attributes:
        live: All live parts by name, those that the policy skips too.
        keys: For each part that is wanted the keys that hold it for this rank; none where the checkpoint lacks it.
        misfits: The wanted parts that were saved by another number of ranks, each with what was found.
        paths: The checkpoint's nested paths, where it has them; to be set before `decide`.
    """

    options: Options
    stored: Mapping[str, Stored]
    manifest: Manifest | None
    live: Mapping[str, Any]
    keys: Mapping[str, tuple[str, ...]]
    misfits: Mapping[str, str]
    paths: Mapping[str, Sequence[Any]] | None = None
    _live_states: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls, live: Live, stored: Mapping[str, Stored], manifest: Manifest | None, options: Options
    ) -> PartsLoad:
        """Look at the live parts: where the checkpoint has them."""
        parts = plain_parts(live)
        found = {
            name: _find(f"{options.key_prefix}{name}", stored, live.ranks, per_rank=is_per_rank(part))
            for name, part in parts.items()
            if name not in options.policy.skip_parts
        }
        return cls(
            options=options,
            stored=stored,
            manifest=manifest,
            live=parts,
            keys={name: keys for name, (keys, _) in found.items()},
            misfits={name: misfit for name, (_, misfit) in found.items() if misfit},
        )

    def leaves(self) -> list[str]:
        """The keys to read before deciding."""
        return [key for keys in self.keys.values() for key in keys]

    def is_known(self, key: str) -> bool:
        """Whether a stored key belongs to a part that is wanted."""
        bases = [f"{self.options.key_prefix}{name}" for name in self.keys]
        return key in bases or key.startswith(tuple(f"{base}." for base in bases))

    def state(self, name: str, small: Mapping[str, Any]) -> Any:
        """A part's saved state; `paths` is to be set where it was saved as a nested dict."""
        return self._read(name, small)[0]

    def _read(self, name: str, small: Mapping[str, Any]) -> tuple[Any, str]:
        """A part's saved state, and why it may not be quite that."""
        base, keys = f"{self.options.key_prefix}{name}", self.keys[name]
        if keys == (base,) or (len(keys) == 1 and keys[0].startswith(f"{base}.rank_")):
            return small[keys[0]], ""
        below = {key: ("part", *path_below(key, f"{base}.", self.paths)) for key in keys}
        state = compat.unflatten_state_dict({key: small[key] for key in keys}, below)["part"]
        number_states(state)
        if name not in self._live_states:
            self._live_states[name] = self.live[name].state_dict()
        keeps = self.options.policy.allow_missing
        try:
            return like_live(state, self._live_states[name], name, keeps_missing=keeps), ""
        except CheckpointMismatch as error:
            return state, f"{error.where}: {error.what}: expected {error.expected}, found {error.found}"

    def decide(self, small: Mapping[str, Any], *, is_weights_only: bool) -> list[Finding]:
        """One finding for each wanted part. Changes nothing live.

        Args:
            small: The leaves, read.
            is_weights_only: Whether the checkpoint has nothing but a model.
        """
        return [self._decide(name, small, is_weights_only) for name in self.keys]

    def _decide(self, name: str, small: Mapping[str, Any], is_weights_only: bool) -> Finding:
        leaf = f"{self.options.key_prefix}{name}"
        if name in self.misfits:
            allowed = self.options.policy.allow_other_ranks
            return Finding(
                verdict="afresh" if allowed else "other ranks", leaf=name, detail=self.misfits[name]
            )
        if self.keys[name]:
            # A part may judge a state without taking it: then what does not fit is refused while all is as it was.
            state, misfit = self._read(name, small)
            misfit = misfit or find_misfit(self.live[name], state)
            return Finding(
                verdict="unfit" if misfit else "loaded", leaf=name if misfit else leaf, detail=misfit
            )
        if self.manifest is not None and name in self.manifest.parts:
            return Finding(verdict="lost", leaf=leaf, detail="the checkpoint's record says that it was saved")
        if is_weights_only or self.options.policy.allow_missing:
            return Finding(verdict="kept", leaf=leaf)
        return Finding(verdict="missing part", leaf=name, detail="a part that the checkpoint does not have")

    def decide_skipped(self, strange: Sequence[str]) -> list[Finding]:
        """What is meant to stay in the checkpoint, of the keys that nothing here takes."""
        prefix = self.options.key_prefix
        skipped = _names(strange, prefix).keys() & self.options.policy.skip_parts
        apart = Counter(key.split(".")[0] for key in strange if not key.startswith(prefix))
        return [self._skipped(name) for name in sorted(skipped)] + [
            Finding(
                verdict="ignored",
                leaf=name,
                detail=f"{counted(count, 'leaf', 'leaves')} under another key prefix",
            )
            for name, count in sorted(apart.items())
        ]

    def _skipped(self, name: str) -> Finding:
        leaf = f"{self.options.key_prefix}{name}"
        slots, _ = part_slots(leaf, self.stored)
        whose = f"; it was saved for each of {counted(len(slots), 'rank')}" if slots else ""
        detail = f"skipped, as the policy says: the live one stays{whose}"
        return Finding(verdict="skipped" if name in self.live else "ignored", leaf=leaf, detail=detail)

    def strangers(self, strange: Iterable[str]) -> frozenset[str]:
        """The parts of the checkpoint that nothing on this rank takes, and that no policy skips."""
        return frozenset(_names(strange, self.options.key_prefix)) - self.options.policy.skip_parts

    def unknown(self, strange: Iterable[str]) -> frozenset[str]:
        """The names that the policy skips, and that are no part on this rank nor in the checkpoint."""
        known = self.live.keys() | _names(strange, self.options.key_prefix).keys() | OWN_PARTS
        return self.options.policy.skip_parts - known

    def judge_strangers(
        self, names: Iterable[str], strange: Collection[str], *, trains: bool
    ) -> list[Finding]:
        """Findings for the parts of the checkpoint that no rank takes.

        A run that resumes by itself has either lost a part of what it is, or resumes another run. An optimizer is
        missed by whoever loads optimizer state, however that was asked for.

        Args:
            names: The parts.
            strange: All keys of parts that are not here.
            trains: Whether optimizer state is loaded at all.
        """
        counts = _names(strange, self.options.key_prefix)
        findings = []
        for name in sorted(names):
            state = (
                f"{self.options.key_prefix}{name}.state.",
                f"{self.options.key_prefix}{name}.param_groups.",
            )
            is_missed = self.options.is_auto or (trains and any(key.startswith(state) for key in strange))
            refused = is_missed and not self.options.policy.allow_unexpected
            verdict: Verdict = "unexpected part" if refused else "ignored"
            detail = f"{counted(counts[name], 'leaf', 'leaves')} of a part that is not here"
            findings.append(Finding(verdict=verdict, leaf=name, detail=detail))
        return findings

    def judge_unknown(self, names: Iterable[str]) -> list[Finding]:
        """Findings for what the policy skips and no rank knows: most likely a part's misspelt name."""
        here = ", ".join(list(self.live)[:_SHOWN]) or "none"
        detail = (
            f"skip_parts names it, and it is no such part here ({here}) nor in the checkpoint; model and optimizers "
            "are none: leave optimizer state by load_states=False"
        )
        return [Finding(verdict="no part", leaf=name, detail=detail) for name in sorted(names)]


def _names(strange: Iterable[str], key_prefix: str) -> Counter[str]:
    """The parts that keys under this prefix belong to, each with how many of them."""
    return Counter(
        key.removeprefix(key_prefix).split(".")[0] for key in strange if key.startswith(key_prefix)
    )


def _find(
    base: str, stored: Mapping[str, Stored], ranks: Ranks, *, per_rank: bool
) -> tuple[tuple[str, ...], str]:
    """The keys that hold a part for this rank: one leaf, or the leaves of a nested dict that plain DCP wrote.

    Args:
        base: The part's name, with the key prefix.
        stored: The checkpoint's leaves.
        ranks: Which slot is this rank's.
        per_rank: Whether each rank must have a slot of its own: what one rank saved is not another's.

    Returns:
        The keys; none when the checkpoint does not have the part. And how it is cut, where that does not fit.
    """
    slots, others = part_slots(base, stored)
    if not slots and not (others and per_rank and ranks.world_size > 1):
        return others, ""
    if len(slots) != ranks.world_size:
        was = (
            f"for each of {counted(len(slots), 'rank')}" if slots else "once, by one of the ranks or for all"
        )
        is_now = ("is " if ranks.world_size == 1 else "are ") + counted(ranks.world_size, "rank")
        return (), f"it was saved {was}, and there {is_now} now"
    return (f"{base}.rank_{ranks.rank}",), ""
