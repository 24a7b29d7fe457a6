"""Names, retention and completeness, decided from names and sizes alone."""

import pytest

from orlop.store import catalog


@pytest.mark.parametrize(
    "name, step",
    [("step-00000100", 100), ("step-12", 12), ("step-0", 0), ("step-123456789012", 123456789012)],
)
def test_a_step_directory_is_known_by_its_name(name: str, step: int) -> None:
    assert catalog.parse_step(name) == step


@pytest.mark.parametrize(
    "name",
    [
        "step-12x",
        "xstep-12",
        "step-",
        "step--1",
        "step-1.5",
        "step-12.partial-h-1-0123abcd",
        "step-12\n",
        "Step-1",
        "step-१",
    ],
)
def test_names_match_exactly(name: str) -> None:
    assert catalog.parse_step(name) is None


def test_step_names_sort_as_their_steps() -> None:
    assert catalog.step_name(100) == "step-00000100"
    assert sorted([catalog.step_name(99_999_999), catalog.step_name(7)])[0] == "step-00000007"
    with pytest.raises(ValueError, match="-1"):
        catalog.step_name(-1)


def test_an_unpublished_name_reads_back() -> None:
    name = catalog.unpublished_name(
        "step-5", kind="partial", host="node-3.cluster-a", pid=77, token="00ff00ff"
    )
    assert name == "step-5.partial-node-3.cluster-a-77-00ff00ff"
    assert catalog.parse_unpublished(name) == catalog.Unpublished(
        final="step-5", kind="partial", host="node-3.cluster-a", pid=77
    )


@pytest.mark.parametrize(
    "name",
    [
        "step-5",
        "step-5.partial-",
        "step-5.partial-mine",
        "step-5.partial-h-x-00ff00ff",
        "step-5.partial-h-1-zz",
    ],
)
def test_a_foreign_name_is_not_an_unpublished_checkpoint(name: str) -> None:
    assert catalog.parse_unpublished(name) is None


@pytest.mark.parametrize(
    "steps, keep_last, keep_every, gone",
    [
        ([10, 20, 30, 40], 3, None, [10]),
        ([40, 10, 30, 20], 1, None, [10, 20, 30]),
        ([10, 20, 30, 40], 1, 20, [10, 30]),
        ([10, 20, 30, 40], 9, None, []),
        ([10, 20, 30, 40], None, None, []),
        ([40], 1, None, []),
    ],
)
def test_expired(steps: list[int], keep_last: int | None, keep_every: int | None, gone: list[int]) -> None:
    assert catalog.expired(steps, published=40, keep_last=keep_last, keep_every=keep_every) == gone


def test_what_was_just_published_never_expires_even_when_it_is_not_the_newest() -> None:
    assert catalog.expired([10, 20, 30], published=10, keep_last=1, keep_every=None) == [20]


WHOLE = {".metadata": 5, "__0_0.distcp": 9}


@pytest.mark.parametrize(
    "present, listed, why",
    [
        (WHOLE, None, None),
        (WHOLE, WHOLE, None),
        ({**WHOLE, "orlop.json": 3, "extra": 1}, WHOLE, None),
        ({}, None, "empty"),
        ({".metadata.tmp": 5, "x.tmp": 1}, None, "temporary files (.metadata.tmp, x.tmp)"),
        ({"__0_0.distcp": 9}, None, ".metadata is missing"),
        ({".metadata": 0, "__0_0.distcp": 9}, None, ".metadata has no content"),
        ({".metadata": 5}, WHOLE, "__0_0.distcp is missing"),
        ({".metadata": 5, "__0_0.distcp": 0}, WHOLE, "__0_0.distcp has 0 bytes instead of 9"),
    ],
)
def test_why_incomplete(present: dict[str, int], listed: dict[str, int] | None, why: str | None) -> None:
    found = catalog.why_incomplete(present, listed)
    assert (found is None) if why is None else (found is not None and why in found)
