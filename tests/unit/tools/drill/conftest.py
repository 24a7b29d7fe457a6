"""A drill looks around in the current directory, where nobody else must write meanwhile."""

import pytest


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """The current directory: one of the test's own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
