"""The tools' tests save with plain torch, which warns of a missing process group."""

import pytest


@pytest.fixture(autouse=True)
def _no_warning_of_single_process(recwarn: pytest.WarningsRecorder) -> None:
    """Kept by the recorder, not shown."""
