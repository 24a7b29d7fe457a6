"""A disk that fails on request, for tests: orlop's own and its users'.

Owns which operation fails, and how; the seam is `operations`. Must not know what the files hold.
"""

from __future__ import annotations

import errno
import os
from types import TracebackType
from typing import Literal

from orlop.store.operations import Operation, observed

Fault = Literal["ENOSPC", "EIO", "EINTR", "short write"]


class FaultyFiles:
    """Within its block, one of the operations that this process does through orlop fails.

        with FaultyFiles() as disk:
            store.save(engine, 1)
        for n in range(len(disk.operations)):
            with FaultyFiles(fail_at=n, fault="ENOSPC"):
                ...

    Args:
        fail_at: Which operation, counted from 0; None for none (they are only recorded).
        fault: What happens to it. `EINTR` and `short write` (a write takes one byte) are no failures: they must be
            survived.
        lasting: Whether all later operations meet the same fate, until the block ends.

    Attributes:
        operations: Every operation that was begun, in order.
        struck: Those that met the fault.
    """

    def __init__(self, *, fail_at: int | None = None, fault: Fault = "EIO", lasting: bool = False) -> None:
        if lasting and fault == "EINTR":
            raise ValueError("an operation that is interrupted for ever never ends")
        self.operations: list[Operation] = []
        self.struck: list[Operation] = []
        self._fail_at = fail_at
        self._fault: Fault = fault
        self._lasting = lasting
        self._block = observed(self._observe)

    def __enter__(self) -> FaultyFiles:
        self._block.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._block.__exit__(kind, error, trace)

    def _observe(self, operation: Operation) -> int | None:
        number = len(self.operations)
        self.operations.append(operation)
        if self._fail_at is None or number < self._fail_at or (number > self._fail_at and not self._lasting):
            return None
        if self._fault == "short write" and operation.size is None:
            return None
        self.struck.append(operation)
        if self._fault == "short write":
            return 1
        code = getattr(errno, self._fault)
        raise OSError(code, os.strerror(code), str(operation.path))
