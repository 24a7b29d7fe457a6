"""What a newcomer runs into: wrong words and places, checkpoints with nothing or one thing in them, pipes, signals."""

import io
import json
import os
import pickle
import signal
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.unit.tools.samples import data_file, flip, golden, save_run

from orlop.cli import render
from orlop.store.files import observed
from orlop.tools.opened import Opened

USAGE = {
    "ls": "RUN",
    "inspect": "CHECKPOINT [PATTERN]",
    "verify": "PATH",
    "diff": "A B",
    "convert": "CHECKPOINT [OUT]",
    "prune": "RUN",
    "drill": "-- COMMAND...",
}


def save(folder, **leaves):
    dcp.save(leaves, checkpoint_id=folder)
    return folder


def strict(text):
    """JSON as its standard has it, without Infinity and NaN."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def apart(code, *arguments, **options):
    """`code`, which knows the command as `main`, in a process of its own."""
    return subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import os, signal, sys\nfrom orlop.cli import main\n{code}",
            *map(str, arguments),
        ],
        text=True,
        **options,
    )


# -- usage -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", USAGE)
def test_usage_lines_show_what_is_typed(call, command):
    out = call(command, "--help")[1]
    assert out.splitlines()[0] == f"Usage: orlop {command} [OPTIONS] {USAGE[command]}"
    code, out, err = call(command)
    assert (code, out) == (2, "")
    assert f" [OPTIONS] {USAGE[command]}\n" in err
    assert "Missing argument" in err


@pytest.mark.parametrize("name", ["pickle", "Torch", " dcp"])
def test_an_unknown_format_is_2_and_lists_the_formats(call, tmp_path, name):
    checkpoint = save(tmp_path / "one", w=torch.ones(1))
    code, out, err = call("convert", checkpoint, tmp_path / "out", "--to", name)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1] == (
        f"Error: Invalid value for '--to': {name!r} is none of safetensors, torch, dcp"
    )
    assert not (tmp_path / "out").exists()


# -- nothing, and one of everything ------------------------------------------------------------------------------------


def test_a_checkpoint_that_holds_nothing(call, tmp_path):
    empty = save(tmp_path / "empty")
    code, out, err = call("inspect", empty)
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == str(empty)
    assert strict(call("inspect", empty, "--json")[1])["leaves"] == []
    assert call("inspect", empty, "w")[0] == 1
    assert "0 leaves in 0 records" in call("verify", empty, "--deep")[1]
    assert call("diff", empty, empty)[0] == 0
    for to in ("torch", "dcp"):
        code, out, err = call("convert", empty, tmp_path / "out", "--to", to)
        assert (code, out) == (3, "")
        assert err.startswith(f"CheckpointNotFound: the checkpoint holds nothing: {empty}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_one_of_each_is_no_plural(call, tmp_path):
    one = save(tmp_path / "one", w=torch.ones(1))
    two = save(tmp_path / "two", w=torch.zeros(1))
    assert "  1 leaf in 1 record; " in call("verify", one)[1]
    assert call("diff", one, one)[1] == "the same: 1 of 1 common leaf is identical bit for bit\n"
    assert call("convert", one, tmp_path / "out", "--to", "torch")[1].startswith(
        f"{tmp_path / 'out'}: 1 leaf in 1 file, "
    )
    assert call("convert", one, "--in-place-index")[1] == f"{one}: 1 index added\n"
    assert "differs in 1 of 1 element, the first at [0]" in call("diff", one, two, "--json")[1]


def test_parts_that_are_not_there_are_told_from_those_that_are(call, tmp_path):
    checkpoint = save(tmp_path / "x", net={"w": torch.ones(1)}, note=1)
    code, out, err = call("convert", checkpoint, tmp_path / "out", "--to", "safetensors")
    assert (code, out) == (3, "")
    assert err == (
        f"CheckpointNotFound: the checkpoint has no such part: {checkpoint}\n"
        "  expected: model\n  found: net, note\n  what to do: choose parts with --only\n"
    )
    # One of several that is misspelt is no less missed.
    code, out, err = call(
        "convert", checkpoint, tmp_path / "out", "--to", "dcp", "--only", "net", "--only", "nota"
    )
    assert (code, out) == (3, "")
    assert "no such part" in err
    assert "expected: nota\n" in err
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_conversion_does_not_go_into_its_source_nor_ignore_options(call, tmp_path):
    checkpoint = save(tmp_path / "x", net={"w": torch.ones(1)})
    before = sorted(checkpoint.iterdir())
    code, _, err = call("convert", checkpoint, checkpoint / "inner" / "y", "--to", "dcp")
    assert code == 3
    assert "not written into another one" in err
    for options in (["--in-place-index", "--only", "net"], ["--in-place-index", "--dtype", "bf16"]):
        assert call("convert", checkpoint, *options)[0] == 2
    assert call("convert", checkpoint, tmp_path / "y", "--to", "dcp", "--cast-moments")[0] == 2
    assert sorted(checkpoint.iterdir()) == before
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


# -- diff --------------------------------------------------------------------------------------------------------------


def test_diff_calls_its_sides_a_and_b_and_shows_no_bytes(call, tmp_path):
    a = save(tmp_path / "a", v=(b"\x00\x01secret", "x"), shape=torch.ones(2), t=torch.ones(3))
    b = save(tmp_path / "b", v=(b"\x00\x02secret!", "x"), shape=torch.ones(3), t=torch.zeros(3))
    code, out, _ = call("diff", a, b)
    assert code == 1
    assert out.splitlines()[1:3] == [f"  A: {a}", f"  B: {b}"]
    assert "value: v[0]: plain data differs; A: 8 bytes, byte 1 is 0x01; B: 9 bytes, byte 1 is 0x02" in out
    assert "shape: shape: its shape differs; A: (2,); B: (3,)" in out
    assert "first: A and B" in out
    assert not any(word in out for word in ("expected", "found", "secret", "\\x"))
    content = strict(call("diff", a, b, "--json")[1])
    assert (content["a"], content["b"]) == (str(a), str(b))
    assert {found["where"]: (found["a"], found["b"]) for found in content["findings"]} == {
        "shape": ("(2,)", "(3,)"),
        "t": ("1.0", "0.0"),
        "v[0]": ("8 bytes, byte 1 is 0x01", "9 bytes, byte 1 is 0x02"),
    }


def test_bytes_are_not_shown_where_types_differ_either(call, tmp_path):
    a = save(tmp_path / "a", v=({"k": b"secret" * 9}, 1))
    b = save(tmp_path / "b", v=([torch.full((9,), 1234.0)], 1))
    out = call("diff", a, b)[1]
    assert "A: dict {'k': <54 bytes>}; B: list [<torch.float32 (9,)>]" in out
    assert "secret" not in out
    assert "1234" not in out


def test_infinite_differences_are_json_all_the_same(call, tmp_path):
    a = save(tmp_path / "a", w=torch.tensor([float("inf"), 1.0]))
    b = save(tmp_path / "b", w=torch.tensor([float("nan"), 1.0]))
    (value,) = strict(call("diff", a, b, "--json")[1])["values"]
    assert (value["max_abs"], value["first_values"]) == ("inf", ["inf", "nan"])


# -- inspect where a data file is gone ---------------------------------------------------------------------------------


@pytest.fixture(params=["gone", "damaged"])
def half(request, tmp_path):
    """A plain checkpoint of two ranks; the file with the learning rate can't be read."""
    path = golden("2.13.0", tmp_path)
    file = path / Opened(path).catalog.extents["optimizer.param_groups.0.lr", None].path
    if request.param == "gone":
        file.unlink()
    else:
        file.write_bytes(bytes(file.stat().st_size))
    return path


def test_inspect_json_gives_all_that_can_be_read_and_why_the_rest_can_not(call, half):
    code, out, err = call("inspect", half, "--json")
    content = strict(out)
    assert code == 3
    assert err.startswith("Checkpoint")
    assert ".distcp" in err.splitlines()[0]
    assert len(content["leaves"]) == sum(part["num_leaves"] for part in content["parts"]) == 35
    assert ".metadata" in {row["name"] for row in content["files"]}
    groups = {leaf["leaf"] for leaf in content["leaves"] if ".param_groups." in leaf["leaf"]}
    shown = {
        f"optimizer.param_groups.{group['index']}.{key}"
        for group in content["groups"]
        for key in group["options"]
    }
    assert content["unread"].keys() <= groups
    assert shown.isdisjoint(content["unread"])
    assert shown | content["unread"].keys() >= {leaf for leaf in groups if not leaf.endswith(".params")}
    assert "optimizer.param_groups.0.lr" in content["unread"]
    assert all(".distcp" in reason for reason in content["unread"].values())


def test_inspect_shows_all_other_views_first(call, half):
    code, out, err = call("inspect", half, "--groups", "--files", "--tensors")
    assert (code, err.count("\n")) == (3, 1 + err.count("\n  "))
    assert ".metadata" in out
    assert "model.a" in out or "float32" in out


def test_inspect_json_of_a_whole_one_has_nothing_unread(call, tmp_path):
    code, out, err = call("inspect", golden("2.13.0", tmp_path), "--json")
    assert (code, err, strict(out)["unread"]) == (0, "", {})


# -- where the output goes ---------------------------------------------------------------------------------------------


def test_a_pipe_that_closes_early_is_quiet_and_no_finding(tmp_path):
    many = save(tmp_path / "many", **{f"w{number}": 1 for number in range(50)})
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as gone:
        process = apart("main()", "inspect", many, "--tensors", stdout=gone, stderr=subprocess.PIPE)
        assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == 128 + signal.SIGPIPE


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_the_exit_code_tells_where_stderr_takes_nothing(tmp_path):
    with open("/dev/full", "w") as full:
        process = apart("main()", "ls", tmp_path / "nowhere", stderr=full)
        assert process.wait(timeout=60) == 3


def test_names_can_not_command_the_terminal(call, tmp_path):
    name = "w\x1b[31m\x07\nw"
    checkpoint = save(tmp_path / "line\nbreak", **{name: torch.ones(1)})
    code, out, err = call("inspect", checkpoint, "--tensors")
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()] == ["leaf", r"w\x1b[31m\x07\nw"]
    for arguments in (["inspect", checkpoint, "--tree"], ["diff", checkpoint, save(tmp_path / "x")]):
        assert not set(call(*arguments)[1]) & {"\x1b", "\x07"}
    (leaf,) = strict(call("inspect", checkpoint, "--json")[1])["leaves"]
    assert leaf["leaf"] == name


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("no_color, is_plain", [(None, False), ("", False), ("1", True)])
def test_no_color_is_honoured(monkeypatch, no_color, is_plain):
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color is not None:
        monkeypatch.setenv("NO_COLOR", no_color)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    render.say("sound", fg="green", bold=True)
    assert (terminal.getvalue() == "sound\n") == is_plain


# -- ended from outside ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["torch", "safetensors", "dcp"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_conversion_that_is_ended_leaves_nothing(call, tmp_path, number, to):
    checkpoint = save(tmp_path / "one", model={"w": torch.ones(1)})
    ended = []

    def end(operation):
        if operation.kind == "write" and not ended:
            ended.append(operation.path)
            signal.raise_signal(number)

    # Unless the command minds it, a SIGTERM is a failure here and not the end of all tests; and shells start
    # background jobs with SIGINT ignored, which is not what is tried here.
    handlers = {
        signal.SIGTERM: lambda *_: pytest.fail("the command does not mind SIGTERM"),
        signal.SIGINT: signal.default_int_handler,
    }
    before = {each: signal.signal(each, handler) for each, handler in handlers.items()}
    try:
        with observed(end):
            code, out, err = call("convert", checkpoint, tmp_path / "out", "--to", to)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert (code, out, err) == (128 + number, "", "")
    assert ended
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


# -- what the system says ----------------------------------------------------------------------------------------------


def test_a_file_where_a_directory_would_be(call, tmp_path):
    checkpoint = save(tmp_path / "one", w=torch.ones(1))
    (tmp_path / "file").write_text("x")
    for to in ("torch", "dcp"):
        code, out, err = call("convert", checkpoint, tmp_path / "file" / "a" / "out", "--to", to)
        assert (code, out) == (3, "")
        assert err == (
            f"StorageRefused: a file stands where its directory would be: {tmp_path / 'file' / 'a' / 'out'}\n"
            f"  found: {tmp_path / 'file'}\n"
        )
    assert (tmp_path / "file").read_text() == "x"


def test_a_read_that_fails_names_its_file(call, tmp_path):
    checkpoint = save(tmp_path / "one", w=torch.ones(1))
    data_file(checkpoint).unlink()
    (checkpoint / "__0_0.distcp").mkdir()
    code, out, err = call("convert", checkpoint, tmp_path / "out", "--to", "torch")
    assert (code, out) == (3, "")
    assert err == f"IsADirectoryError: [Errno 21] Is a directory: '{checkpoint / '__0_0.distcp'}'\n"


def test_broken_metadata_is_named_once(call, tmp_path):
    checkpoint = save(tmp_path / "one", w=torch.ones(1))
    file = checkpoint / ".metadata"
    for content, said in (
        (b"", "it ends early"),
        (b"garbage", "opcode 0x67 at byte 0"),
        (pickle.dumps({"a": 1}), "dict"),
    ):
        file.write_bytes(content)
        for command in (["inspect"], ["convert", tmp_path / "out", "--to", "dcp"]):
            code, out, err = call(command[0], checkpoint, *command[1:])
            assert (code, out) == (3, "")
            assert err.startswith("CheckpointCorrupt: ")
            assert (err.count(str(file)), err.splitlines()[1:]) == (1, [f"  found: {said}"])
        assert call("verify", checkpoint)[0] == 1
    assert not (tmp_path / "out").exists()


def test_json_is_json_on_every_command(call, tmp_path):
    run = save_run(tmp_path / "run", (10, 20))
    flip(data_file(run / "step-00000010"), 0.5)
    old, new = run / "step-00000010", run / "step-00000020"
    for code, *arguments in (
        (1, "ls", run, "--verify"),
        (0, "inspect", new),
        (1, "inspect", new, "no such leaf"),
        (1, "verify", run),
        (0, "diff", new, new),
        (0, "convert", new, tmp_path / "out", "--to", "safetensors"),
        (0, "convert", new, "--in-place-index"),
        (0, "prune", run, "--keep-last", 1, "--dry-run"),
    ):
        found, out, _ = call(*arguments, "--json")
        assert found == code, arguments
        strict(out)
    assert call("verify", old, "--json")[0] == 1
