"""SIGTERM as a request: noted when it comes, acted on between steps. Must not know what is stopped."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def sigterm() -> Iterator[threading.Event]:
    """Within the block SIGTERM only sets the event; outside the main thread signals are left alone."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def note(number: int, frame: FrameType | None) -> None:
        asked.set()

    previous = signal.signal(signal.SIGTERM, note)
    try:
        yield asked
    finally:
        # None: a handler that Python did not install and can't put back.
        signal.signal(signal.SIGTERM, previous if previous is not None else signal.SIG_DFL)
