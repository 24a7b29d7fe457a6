"""Containers that DCP took apart, in the kinds that they had.

Owns what a path of keys doesn't tell: DCP writes every key of a dict as text, makes dicts of all mappings, and drops
containers in which nothing is. Live containers tell it. Must not know what the leaves mean, nor files.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from orlop import compat
from orlop.errors import CheckpointMismatch
from orlop.state.plain import digest

__all__ = ["leaves_of", "like_live", "number_states"]

_NOTHING = object()
_NO_NUMBERS = frozenset({"nan", "inf", "-inf"})
_WORDS = {"True": True, "False": False, "None": None}


def leaves_of(value: Any) -> dict[tuple[Any, ...], Any]:
    """Plain data as the leaves that DCP makes of it, by path; as one leaf where the paths would not give it back."""
    if not isinstance(value, (Mapping, list)):
        return {(): value}
    try:
        flat, paths = compat.flatten_state_dict({"value": value})
    except ValueError:  # two keys that are one as text
        return {(): value}
    has_dots = any("." in str(segment) for path in paths.values() for segment in path)
    given_back = compat.unflatten_state_dict(flat, paths).get("value", _NOTHING)
    if has_dots or (given_back is not value and digest(given_back) != digest(value)):
        return {(): value}
    return {paths[key][1:]: leaf for key, leaf in flat.items()}


def number_states(value: Any) -> None:
    """Make numbers of the keys of an optimizer's state that were numbers, in place: its param groups tell."""
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        number_states(inner)
    match value:
        case {"state": dict(state), "param_groups": list(groups)}:
            members = [
                param for group in groups if isinstance(group, dict) for param in group.get("params") or ()
            ]
            names = {str(param): param for param in members}
            value["state"] = {names.get(key, key): entry for key, entry in state.items()}


def like_live(value: Any, live: Any, where: str, *, keeps_missing: bool = False) -> Any:
    """Containers that were read leaf by leaf, with the keys and kinds of the live ones, and the empty ones as well.

    Args:
        value: Dicts with text for keys, lists, and leaves.
        live: What is there now, where it would be put.
        where: Its name, for the message.
        keeps_missing: Whether a dict may be missing that is there now; else it may have been empty, or not there.

    Raises:
        CheckpointMismatch: What a container was can't be told.
    """
    if isinstance(value, list):
        lives = live if isinstance(live, (list, tuple)) else ()
        if not any(isinstance(item, (Mapping, list)) for item in (*value, *lives)):
            return value
        return _listed(value, lives, where, keeps_missing=keeps_missing)
    if type(value) is not dict:
        return value
    known = live if isinstance(live, Mapping) else {}
    found = {
        key: like_live(item, known.get(key), f"{where}[{key!r}]", keeps_missing=keeps_missing)
        for key, item in zip(_keys(value, known, where), value.values())
    }
    for key, other in known.items():
        if key in found:
            continue
        if _is_dropped(other):
            found[key] = copy.deepcopy(other)
        elif isinstance(other, Mapping) and not keeps_missing:
            raise CheckpointMismatch(
                "an empty dict leaves no trace in a file of DCP, nor does one that was not there "
                "(LoadPolicy(allow_missing=True) lets it be missing)",
                where=f"{where}[{key!r}]",
                expected="what is in it, as here",
                found="nothing",
            )
    if isinstance(live, defaultdict):
        return defaultdict(live.default_factory, found)
    return type(live)(found) if type(live) in (OrderedDict, Counter) else found


def _listed(value: Sequence[Any], lives: Sequence[Any], where: str, *, keeps_missing: bool) -> list[Any]:
    found: list[Any] = []
    for index, (item, other) in enumerate(zip_longest(value, lives, fillvalue=_NOTHING)):
        if (item is _NOTHING or item is None) and _is_dropped(other):
            item = copy.deepcopy(other)
        elif item is _NOTHING:
            break
        found.append(like_live(item, other, f"{where}[{index}]", keeps_missing=keeps_missing))
    return found


def _is_dropped(value: Any) -> bool:
    """Whether DCP makes no leaf of it."""
    return isinstance(value, (Mapping, list)) and not compat.flatten_state_dict({"value": value})[0]


def _keys(value: Mapping[Any, Any], known: Mapping[Any, Any], where: str) -> list[Any]:
    """The keys of a dict, with their kinds again."""
    texts = {str(key): key for key in known}
    kinds = {type(key) for key in known}
    return [
        key if not isinstance(key, str) else texts[key] if key in texts else _key(key, kinds, where)
        for key in value
    ]


def _key(text: str, kinds: set[type], where: str) -> Any:
    """A key that no live dict has, of the kind that the live keys are of."""
    meant = _read(text)
    if kinds == {type(meant)}:
        return meant
    if kinds == {str} or (meant is text and (not kinds or str in kinds)):
        return text
    raise CheckpointMismatch(
        "DCP writes every key as text, and nothing here tells what this one was",
        where=where,
        expected=f"keys like the live ones: {' or '.join(sorted(kind.__name__ for kind in kinds))}"
        if kinds
        else "a live dict with such keys",
        found=repr(text),
    )


def _read(text: str) -> Any:
    """What else than text a key may have been, by what it reads like."""
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        if str(number) == text and text not in _NO_NUMBERS:
            return number
    return _WORDS.get(text, text)
