"""Names that one side has and the other does not: unexpected ones, and whole layouts or prefixes that differ.

Pure, over names. Must not know leaves' content, files or ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from orlop.state.policy import LoadPolicy
from orlop.state.report import Finding, Verdict

__all__ = ["check_model_layout", "check_unclaimed", "nearest_prefix"]

_SHOWN = 4


def check_unclaimed(
    what: str, unclaimed: Collection[str], total: int, expected: Collection[str], policy: LoadPolicy
) -> list[Finding]:
    """Findings for stored names that no rank takes.

    Args:
        what: The prefix that they stand under: `model.` or `optimizer.state.`.
        unclaimed: The names.
        total: How many names the checkpoint has under that prefix.
        expected: The names that are expected here.
        policy: What may be tolerated.
    """
    if what.endswith(".state.") and unclaimed and len(unclaimed) == total and expected:
        detail = _no_match(what, expected, unclaimed)
        return [Finding(verdict="layout", leaf=what.rstrip("."), detail=detail)]
    verdict: Verdict = "ignored" if policy.allow_unexpected else "unexpected"
    return [Finding(verdict=verdict, leaf=f"{what}{name}") for name in sorted(unclaimed)]


def _no_match(what: str, expected: Collection[str], there: Collection[str]) -> str:
    detail = f"no parameter name matches: here {sorted(expected)[:_SHOWN]}, in the checkpoint {sorted(there)[:_SHOWN]}"
    if all(name.isdigit() for name in there):
        return f"{detail}; those are positions in one optimizer's lists, which say nothing of which parameter was meant"
    prefix = nearest_prefix(expected, there)
    return detail if prefix is None else f"{detail}; the checkpoint's names start with {prefix!r}"


def check_model_layout(prefix: str, expected: Collection[str], stored: Collection[str]) -> Finding | None:
    """The finding for a model of which not one leaf is in the checkpoint; None where some are.

    Args:
        prefix: What the model's keys should start with: `model.`, after the key prefix.
        expected: The FQNs that are expected.
        stored: All keys of the checkpoint.
    """
    keys = {f"{prefix}{fqn}" for fqn in expected}
    if not keys or not keys.isdisjoint(stored):
        return None
    detail = f"no key matches: here {sorted(keys)[:_SHOWN]}, in the checkpoint {sorted(stored)[:_SHOWN]}"
    if (nearest := nearest_prefix(keys, stored)) is not None:
        detail += f"; the checkpoint's keys have {nearest!r} before them: load with key_prefix={nearest!r}"
    elif (nearest := nearest_prefix(expected, stored)) is not None:
        detail += f"; the checkpoint's keys start with {nearest!r} where {prefix!r} is expected"
    return Finding(verdict="layout", leaf=prefix.rstrip("."), detail=detail)


def nearest_prefix(expected: Iterable[str], there: Iterable[str]) -> str | None:
    """What most names of one side have before a name of the other; None where no name ends like an expected one."""
    wanted = set(expected)
    counted: Counter[str] = Counter()
    for name in there:
        segments = name.split(".")
        for cut in range(1, len(segments)):
            if ".".join(segments[cut:]) in wanted:
                counted[".".join(segments[:cut]) + "."] += 1
    return counted.most_common(1)[0][0] if counted else None
