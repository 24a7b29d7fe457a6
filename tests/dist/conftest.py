"""Tests marked `fsdp` skip themselves where FSDP2 can't run without an accelerator."""

import pytest

from orlop import compat


def pytest_collection_modifyitems(items):
    if compat.torch_release() >= (2, 9):
        return
    skip = pytest.mark.skip(reason="FSDP2 does not run on the CPU: there a Stream has no record_event")
    for item in items:
        if item.get_closest_marker("fsdp"):
            item.add_marker(skip)
