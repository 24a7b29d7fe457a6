"""A policy takes what it says and nothing that only looks like it."""

import pytest

from orlop import LoadPolicy


@pytest.mark.parametrize("name, text", [("reset_damaged", "fc.*"), ("skip_parts", "rng")])
def test_a_string_is_not_taken_letter_by_letter(name, text):
    with pytest.raises(TypeError) as caught:
        LoadPolicy(**{name: text})
    assert str(caught.value) == (
        f"{name} must be a collection of strings; it is {text!r}: write {name}=({text!r},)"
    )


@pytest.mark.parametrize(
    "values",
    [
        {"reset_damaged": 3},
        {"skip_parts": None},
        {"skip_parts": ["rng", 3]},
        {"allow_missing": "no"},
        {"verify_first": 1},
        {"cast_dtypes": None},
    ],
)
def test_what_is_of_another_type_is_named(values):
    (name,) = values
    with pytest.raises(TypeError, match=f"{name} must be"):
        LoadPolicy(**values)


def test_collections_of_every_kind_are_frozen():
    policy = LoadPolicy(reset_damaged=["a.*", "b"], skip_parts=["rng", "data"])
    assert policy == LoadPolicy(reset_damaged=("a.*", "b"), skip_parts=frozenset({"data", "rng"}))
    assert hash(policy) == hash(LoadPolicy(reset_damaged=("a.*", "b"), skip_parts={"data", "rng"}))
