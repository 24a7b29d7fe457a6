"""A path that is not what a command needs: one message that says what is there and what to give; never a traceback."""

import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.unit.tools.samples import golden, save_run

READERS = {
    "inspect": [],
    "verify": [],
    "diff": ["{path}"],
    "convert": ["{out}", "--to", "dcp"],
}
RUN_READERS = {"ls": [], "prune": ["--keep-last", "1"]}
ALL = {**READERS, **RUN_READERS}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_run(tmp_path_factory.mktemp("saved") / "run", (10, 20))


@pytest.fixture
def refused(call, tmp_path):
    """The message with which a command refuses a path; it wrote nothing."""

    def run(command, path):
        words = [word.format(path=path, out=tmp_path / "out") for word in ALL[command]]
        code, out, err = call(command, path, *words)
        assert (code, out) == (3, "")
        assert "Traceback" not in err
        assert str(path) in err.splitlines()[0]
        assert not (tmp_path / "out").exists()
        return err

    return run


@pytest.mark.parametrize("command", ALL)
def test_nothing_there_is_one_line(refused, tmp_path, command):
    path = tmp_path / "nowhere"
    assert refused(command, path) == f"CheckpointNotFound: there is no such directory: {path}\n"


@pytest.mark.parametrize("command", ALL)
def test_a_file(refused, saved, tmp_path, command):
    (tmp_path / "x.pt").write_text("x")
    assert "orlop reads directories that torch.distributed.checkpoint wrote" in refused(
        command, tmp_path / "x.pt"
    )
    inside = saved / "step-00000010" / "orlop.json"
    assert refused(command, inside) == (
        f"CheckpointNotFound: this is a file, not a directory: {inside}\n"
        f"  what to do: give the directory that it is in: {inside.parent}\n"
    )


@pytest.mark.parametrize("command", ALL)
def test_a_directory_without_any_checkpoint_says_what_is_in_it(refused, tmp_path, command):
    assert "found: nothing" in refused(command, tmp_path)
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).write_text("x")
    message = refused(command, tmp_path)
    assert "there is no checkpoint in this directory" in message
    assert "found: config.json, model.safetensors" in message


@pytest.mark.parametrize("command", ALL)
def test_a_directory_above_names_what_is_below(refused, tmp_path, command):
    golden("2.6.0", tmp_path / "outputs")
    nested, flattened = (str(tmp_path / "outputs" / name) for name in ("nested", "flattened"))
    for path in (tmp_path / "outputs", tmp_path):
        assert f"give one of these: {flattened}, {nested}" in refused(command, path)


@pytest.mark.parametrize("command", ["diff", "convert"])
def test_a_run_where_a_checkpoint_is_meant_says_which_steps_there_are(refused, saved, command):
    message = refused(command, saved)
    assert message.startswith(
        f"CheckpointNotFound: this is a run's directory, not one checkpoint: {saved}\n  found: steps 20, 10\n"
    )
    assert message.endswith(f"give one of them, such as {saved / 'step-00000020'}\n")


def test_the_step_to_give_is_one_that_is_complete(refused, saved, tmp_path):
    run = shutil.copytree(saved, tmp_path / "run")
    (run / "step-00000020" / ".metadata").unlink()
    assert "such as " + str(run / "step-00000010") in refused("convert", run)


@pytest.mark.parametrize("command", RUN_READERS)
def test_a_checkpoint_where_a_run_is_meant(refused, saved, command):
    message = refused(command, saved / "step-00000020")
    assert "this is a checkpoint, not a run's directory" in message
    assert "give the directory above it" in message


def test_a_run_whose_first_save_is_under_way_is_listed(call, tmp_path):
    (tmp_path / "step-00000003.partial-host-1-00000000").mkdir()
    code, out, err = call("ls", tmp_path)
    assert (code, err) == (0, "")
    assert "partial: being written, or left by process 1 on host" in out


def test_ls_json_of_nothing_is_no_json_and_3(call, tmp_path):
    code, out, err = call("ls", tmp_path, "--json")
    assert (code, out, err != "") == (3, "", True)


@contextmanager
def without_permission(run):
    """A copy of a run that this process may not read; root reads all, so it becomes nobody for that long."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        locked = shutil.copytree(run, Path(folder) / "run")
        locked.chmod(0)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)
        try:
            yield locked
        finally:
            os.seteuid(user)
            locked.chmod(0o755)


@pytest.mark.parametrize("command", ALL)
def test_no_permission_is_one_line(call, saved, command):
    with without_permission(saved) as locked:
        words = [word.format(path=locked, out=locked.parent / "out") for word in ALL[command]]
        code, out, err = call(command, locked, *words)
    assert (code, out) == (3, "")
    assert err.startswith("PermissionError: ")
    assert str(locked) in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("command", ALL)
def test_addresses(refused, command):
    message = refused(command, "nowhere://bucket/run")
    assert message.startswith("CheckpointError: this address can't be read: nowhere://bucket/run\n")
    assert "found: ValueError: Protocol not known: nowhere" in message
    assert "there is no checkpoint in this directory" in refused(command, "memory://bucket/no-run")


def test_a_package_that_is_missing_is_named(refused, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "s3fs", None)
    assert "pip install 'orlop[s3]'" in refused("ls", "s3://bucket/run")


@pytest.mark.parametrize("command", READERS)
def test_a_run_in_an_object_store(call, refused, tmp_path, command):
    run = f"memory://bucket{tmp_path}"
    save_run(run, (10, 20))
    if command in ("inspect", "verify"):
        assert call(command, run)[0] == 0
    else:
        assert f"such as {run}/step-00000020" in refused(command, run)
    words = [word.format(path=f"{run}/step-00000010", out=tmp_path / "out") for word in ALL[command]]
    assert call(command, f"{run}/step-00000010", *words)[0] == 0


def test_an_output_that_can_not_be_written(call, saved, tmp_path):
    source = saved / "step-00000010"
    (tmp_path / "file").write_text("x")
    for out, said in (
        (tmp_path / "file", "nothing is written over"),
        ("s3://b/x", "written to this machine"),
    ):
        code, text, err = call("convert", source, out, "--to", "torch")
        assert (code, text) == (3, "")
        assert said in err.splitlines()[0]
        assert "Traceback" not in err
    assert call("convert", source, tmp_path / "file" / "out", "--to", "torch")[0] == 3
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "x"
