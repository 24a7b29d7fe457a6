"""Tests that run twice: with torch's own optimizer class, and with its host-resident twin.

A module takes part by importing the fixture `kind`.
"""

import pytest

from orlop import swap

_kind = "stock"


@pytest.fixture(autouse=True, params=["stock", "swapped"])
def kind(request, monkeypatch):
    """Which of the two; every test of the module runs with both."""
    monkeypatch.setattr("tests.unit.kinds._kind", request.param)


def is_swapped():
    return _kind == "swapped"


def of_kind(optimizer_class):
    return swap(optimizer_class) if is_swapped() else optimizer_class


def change_kind(monkeypatch):
    """From here on in this test, the other one."""
    monkeypatch.setattr("tests.unit.kinds._kind", "stock" if is_swapped() else "swapped")
