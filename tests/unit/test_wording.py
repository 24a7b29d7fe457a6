"""Counts as people say them."""

import pytest

from orlop.wording import counted


@pytest.mark.parametrize(
    "count, text", [(0, "0 files"), (1, "1 file"), (2, "2 files"), (12345, "12,345 files")]
)
def test_a_one_is_no_plural(count, text):
    assert counted(count, "file") == text


def test_plurals_of_their_own():
    assert counted(1, "leaf is", "leaves are") == "1 leaf is"
    assert counted(3, "leaf is", "leaves are") == "3 leaves are"
