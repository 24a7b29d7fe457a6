"""Object stores, with fsspec's in-memory one: the manifest is the commit, whatever fails and whenever."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from orlop.errors import CheckpointCorrupt, CheckpointExists, CheckpointIncomplete, RootNotShared
from orlop.store import owned
from orlop.store.manifest import MANIFEST_NAME, Manifest
from orlop.store.objects import RemoteDirectory, Url, directory_at, locate
from orlop.store.remote import MARKER_NAME, RemotePending, RemoteRoot

ROOT = Url("flaky://bucket/run")
URL = ROOT / "step-00000010"
MANIFEST = Manifest(torch_version="2", world_size=1)


class Flaky(MemoryFileSystem):
    """Fails the request number `fail_at`, a write after its half; has no rename."""

    protocol = "flaky"
    store: dict[str, Any] = {}
    pseudo_dirs: list[str] = [""]
    requests: list[str] = []
    fail_at: int | None = None
    cachable = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(path.replace("flaky://", "memory://"))

    @classmethod
    def ask(cls, what: str) -> None:
        cls.requests.append(what)
        if cls.fail_at is not None and len(cls.requests) > cls.fail_at:
            cls.fail_at = None
            raise OSError(5, f"the connection broke: {what}")

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        self.ask(f"put {path}")
        super().pipe_file(path, value, mode, **kwargs)

    def rm_file(self, path: str) -> None:
        self.ask(f"delete {path}")
        super().rm_file(path)

    def open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if "w" in mode:
            self.ask(f"upload {path}")
        return super().open(path, mode, **kwargs)

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        file = super()._open(path, mode, **kwargs)
        write = file.write

        def write_or_break(data: Any) -> int:
            try:
                self.ask(f"write {path}")
            except OSError:
                write(bytes(data)[: len(data) // 2])
                raise
            return int(write(data))

        if "w" in mode:
            file.write = write_or_break
        return file

    def mv(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("an object store has no rename")

    rename = mv


@pytest.fixture(autouse=True)
def bucket() -> Iterator[type[Flaky]]:
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    Flaky.store.clear()
    Flaky.requests.clear()
    Flaky.fail_at = None
    yield Flaky
    Flaky.fail_at = None


def write(url: Url, content: bytes = b"data") -> None:
    pending = RemotePending(url, RemotePending.begin(url))
    try:
        pending.require_visible()
        for name in ("__0_0.distcp", ".metadata"):
            with pending.directory.create(name) as file:
                file.write(content)
        pending.publish(MANIFEST)
    except BaseException:
        pending.discard()
        raise


def test_locations() -> None:
    assert locate("s3://bucket/run/") == Url("s3://bucket/run")
    assert not isinstance(locate("file:///tmp/run"), Url)
    assert str(locate("file:///tmp/run")) == "/tmp/run"
    assert str(locate("runs/one")) == "runs/one"
    assert locate(Path("runs/one")) == Path("runs/one")
    with pytest.raises(ValueError, match="as a string"):
        locate(Path("s3://bucket/run"))
    url = Url("s3://bucket/run") / "step-1"
    assert (url, url.name, url.parent) == ("s3://bucket/run/step-1", "step-1", "s3://bucket/run")


def test_objects_read_like_files() -> None:
    directory = directory_at(str(URL))
    assert isinstance(directory, RemoteDirectory)
    assert not directory.exists("")
    with directory.create("a") as file:
        file.write(b"0123")
        file.write(memoryview(b"456789"))
    assert directory.exists("")
    assert directory.exists("a")
    assert directory.read("a") == b"0123456789"
    data = directory.open("a")
    assert data.size == 10
    assert data.read(2, 3) == b"234"
    assert data.read(8, 5) == b"89"
    assert data.read(10, 5) == b""
    one, two = bytearray(3), bytearray(4)
    assert data.read_into(5, [memoryview(one), memoryview(two)]) == 5
    assert (bytes(one), bytes(two)) == (b"567", b"89\0\0")
    assert directory.path_of("a") == f"{URL}/a"
    for absent in (directory.read, directory.open):
        with pytest.raises(FileNotFoundError):
            absent("b")


def test_an_upload_whose_block_raises_leaves_no_object() -> None:
    directory = RemoteDirectory(URL)

    def break_off() -> None:
        with directory.create("a") as file:
            file.write(b"half")
            raise ValueError("half-way")

    with pytest.raises(ValueError, match="half-way"):
        break_off()
    assert directory.sizes() == {}


def test_a_checkpoint_is_there_when_its_manifest_is() -> None:
    root = RemoteRoot(ROOT)
    signature = RemotePending.begin(URL)
    pending = RemotePending(URL, signature)
    assert root.checkpoints() == []
    with pending.directory.create(".metadata") as file:
        file.write(b"meta")
    (found,) = root.checkpoints()
    assert isinstance(found.fault, CheckpointIncomplete)
    assert MANIFEST_NAME in str(found.fault.found)
    assert found.skippable
    pending.publish(MANIFEST)
    (found,) = root.checkpoints()
    assert found.fault is None
    assert (found.step, found.name, found.path) == (10, "step-00000010", URL)
    assert found.manifest is not None
    assert found.manifest.files == {".metadata": 4}
    assert RemoteDirectory(URL).sizes().keys() == {".metadata", MANIFEST_NAME}
    # The commit is the last put of all.
    puts = [request for request in Flaky.requests if not request.startswith("delete")]
    assert puts[-1].endswith(f"/bucket/run/step-00000010/{MANIFEST_NAME}")


@pytest.mark.parametrize("damage", ["gone", "short", "manifest"])
def test_objects_that_the_manifest_promises_must_be_there(damage: str) -> None:
    write(URL)
    directory = RemoteDirectory(URL)
    if damage == "gone":
        directory.remove("__0_0.distcp")
    elif damage == "short":
        directory.replace("__0_0.distcp", b"dat")
    else:
        directory.replace(MANIFEST_NAME, b"{}")
    (found,) = RemoteRoot(ROOT).checkpoints()
    assert isinstance(found.fault, CheckpointCorrupt if damage == "manifest" else CheckpointIncomplete)
    assert found.skippable
    assert "step-00000010" in str(found.fault.where)


def test_c12_a_request_that_fails_publishes_nothing_and_the_retry_succeeds() -> None:
    write(ROOT / "step-00000005", b"old")
    old = dict(RemoteDirectory(ROOT / "step-00000005").sizes())
    number = 0
    while True:
        Flaky.requests.clear()
        Flaky.fail_at = number
        failure = None
        try:
            write(URL)
        except OSError as error:
            failure = str(error)
        failed = failure is not None
        assert not failed or "connection broke" in str(failure)
        struck = Flaky.fail_at is None
        Flaky.fail_at = None
        steps = [found.step for found in RemoteRoot(ROOT).checkpoints() if found.fault is None]
        assert steps == ([5] if failed else [5, 10]), number
        if failed:
            write(URL)
        assert [found.step for found in RemoteRoot(ROOT).checkpoints() if found.fault is None] == [5, 10]
        assert RemoteDirectory(ROOT / "step-00000005").sizes() == old
        RemoteRoot(ROOT).retire(RemoteRoot(ROOT).checkpoints()[1])
        number += 1
        if not struck:
            break
    assert number > 4


def test_a_retry_does_not_mix_with_what_an_earlier_try_left() -> None:
    pending = RemotePending(URL, RemotePending.begin(URL))
    with pending.directory.create("__7_0.distcp") as file:
        file.write(b"of a larger world")
    write(URL)
    assert RemoteDirectory(URL).sizes().keys() == {".metadata", "__0_0.distcp", MANIFEST_NAME}
    # The writer of the earlier try, if it lives after all, has lost its place and takes nothing away.
    with pytest.raises(RootNotShared):
        pending.require_visible()
    pending.discard()
    (found,) = RemoteRoot(ROOT).checkpoints()
    assert found.fault is None


def test_what_orlop_did_not_write_is_never_removed() -> None:
    directory = RemoteDirectory(URL)
    directory.replace("thesis.txt", b"precious")
    with pytest.raises(CheckpointExists) as caught:
        RemotePending.begin(URL)
    assert caught.value.where == str(URL)
    root = RemoteRoot(ROOT)
    root.sweep()
    (found,) = root.checkpoints()
    with pytest.raises(CheckpointExists):
        root.set_aside(found, "incomplete")
    assert directory.read("thesis.txt") == b"precious"


def test_a_checkpoint_is_not_written_over() -> None:
    write(URL)
    with pytest.raises(CheckpointExists):
        RemotePending.begin(URL)
    assert RemoteRoot(ROOT).checkpoints()[0].fault is None


def test_another_store_is_named() -> None:
    pending = RemotePending(URL, RemotePending.begin(URL))
    RemoteDirectory(URL).remove(MARKER_NAME)
    with pytest.raises(RootNotShared) as caught:
        pending.require_visible()
    assert socket.gethostname() in str(caught.value.where)
    assert str(URL) in str(caught.value.where)


def test_retiring_takes_the_manifest_first() -> None:
    write(URL)
    root = RemoteRoot(ROOT)
    Flaky.requests.clear()
    root.retire(root.checkpoints()[0])
    assert Flaky.requests[0] == f"delete /bucket/run/step-00000010/{MANIFEST_NAME}"
    assert RemoteDirectory(URL).sizes() == {}


def test_only_what_the_dead_left_is_swept() -> None:
    root = RemoteRoot(ROOT)
    RemotePending.begin(URL)  # being written by this process
    for step, host in ((11, socket.gethostname()), (12, "elsewhere")):
        directory = RemoteDirectory(ROOT / f"step-{step:08d}")
        # This process's own id, not in use: dead. On another host, just written: alive.
        signature = owned.sign(f"step-{step:08d}", "partial").replace(socket.gethostname(), host)
        directory.replace(MARKER_NAME, signature.encode())
        directory.replace("__0_0.distcp", b"half")
    RemoteDirectory(ROOT).replace(owned.sign("step-00000010", "reading"), b"")
    root.sweep()
    assert sorted({name.partition("/")[0] for name in RemoteDirectory(ROOT).sizes()}) == [
        "step-00000010",
        "step-00000012",
    ]


def test_a_reader_shows_itself_for_as_long_as_it_reads() -> None:
    root = RemoteRoot(ROOT)
    with root.reading("step-00000010"):
        assert root.being_read() == {"step-00000010"}
    assert root.being_read() == set()
    assert RemoteDirectory(ROOT).sizes() == {}
    Flaky.fail_at = len(Flaky.requests)
    with root.reading("step-00000010"):
        assert root.being_read() == set()


def test_a_scheme_without_its_package_says_what_to_install() -> None:
    with pytest.raises((ImportError, ValueError)):
        RemoteDirectory(Url("nosuchscheme://bucket/run"))
