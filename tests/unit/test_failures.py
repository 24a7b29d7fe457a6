"""A failure as something that can be sent to any rank, whatever the exception was."""

import errno
import pickle

import pytest

from orlop.errors import (
    CheckpointCorrupt,
    CheckpointMismatch,
    OrlopError,
    RankFailed,
    StorageFull,
    StorageRefused,
)
from orlop.failures import Told, as_error, failures_of, told


class KeywordOnly(Exception):
    def __init__(self, *, code):
        super().__init__(f"code {code}")


class Holding(Exception):
    def __init__(self):
        super().__init__("held", lambda: 0)

    def __str__(self):
        return "holds a function"


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class Derived(CheckpointMismatch):
    """Of someone else's, with a constructor of its own."""

    def __init__(self, leaf):
        super().__init__("differs", where=leaf, expected="2x2", found="3x3", todo="mend it")


def sent(raised):
    """What another rank gets of it, through DCP's own pickling."""
    with pytest.raises(BaseException) as caught, told():
        raise raised
    return pickle.loads(pickle.dumps(caught.value))


def error_of(raised, world_size=2):
    return as_error("read", failures_of(raised, 1), world_size)


def local_class():
    class Local(OSError):
        pass

    return Local("of this rank alone")


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (KeywordOnly(code=5), "KeywordOnly: code 5"),
        (Holding(), "Holding: holds a function"),
        (Mute(), "Mute: (its text can't be had: RuntimeError)"),
        (local_class(), "Local: of this rank alone"),
        (OSError(errno.EIO, "io error"), "OSError: [Errno 5] io error"),
        (GeneratorExit("gone"), "GeneratorExit: gone"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_another_librarys_exception_is_told_as_text_with_its_place(raised, said):
    other = sent(raised)
    assert type(other) is Told
    error = error_of(other)
    assert type(error) is RankFailed
    assert error.what == "could not read"
    assert error.where == "rank 1"
    assert error.found.startswith(said + " (test_failures.py:")
    assert error.found.endswith(" in sent)")


def test_what_the_system_refuses_stays_that_and_says_what_was_to_be_done():
    full = error_of(sent(OSError(errno.ENOSPC, "No space left on device")))
    assert type(full) is StorageFull
    assert full.what == "could not read: No space left on device"
    refused = error_of(sent(PermissionError(errno.EACCES, "Permission denied", "/x/y")))
    assert type(refused) is StorageRefused
    assert (refused.what, refused.where) == ("could not read: Permission denied", "rank 1; /x/y")


def test_an_own_error_is_sent_as_it_is():
    other = sent(CheckpointCorrupt("bad block", where="file 3", expected="1", found="2", todo="go back"))
    assert type(other) is CheckpointCorrupt
    assert (other.what, other.where, other.expected, other.found, other.todo) == (
        "bad block",
        "file 3",
        "1",
        "2",
        "go back",
    )


def test_an_error_derived_from_an_own_one_counts_as_that_with_all_its_fields():
    error = error_of(sent(Derived("model.w")))
    assert type(error) is CheckpointMismatch
    assert (error.what, error.where) == ("differs", "rank 1; model.w")
    assert (error.expected, error.found, error.todo) == ("2x2", "3x3", "mend it")
    # The same where it is not DCP that tells the others.
    assert str(error_of(Derived("model.w"))) == str(error)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_stays_one(kind):
    with pytest.raises(kind), told():
        raise kind


def test_every_own_error_can_be_sent():
    kinds = [OrlopError]
    for kind in kinds:
        kinds += kind.__subclasses__() if kind is not Derived.__base__ else []
        other = sent(kind("what", where="where", todo="todo"))
        assert (type(other), other.what, other.where, other.todo) == (kind, "what", "where", "todo")
    assert len(kinds) > 12
