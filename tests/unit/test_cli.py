"""The command line: what it prints, its exit codes, and that what needs no torch starts without it."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.tools.samples import VERSIONS, data_file, flip, golden, save_run

from orlop.version import __version__

RUN_MAIN = "import sys; from orlop.cli import main\ntry:\n    main()\nfinally:\n    "
FORBIDDEN = (
    "found = {'torch', 'numpy'} & set(sys.modules)\n    if found: print('imported', found, file=sys.stderr)"
)
STAND_IN = Path(__file__).parent / "tools" / "drill" / "stand_in_training.py"
COMMANDS = ("ls", "inspect", "verify", "diff", "convert", "prune", "drill")


def apart(*arguments):
    """The command in a process of its own, which says when torch or numpy was imported."""
    return subprocess.run(
        [sys.executable, "-c", RUN_MAIN + FORBIDDEN, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "NO_COLOR": "1"},
    )


@pytest.fixture
def run(tmp_path):
    return save_run(tmp_path / "run", (10, 20))


@pytest.fixture(params=[*VERSIONS, "orlop"])
def checkpoint(request, tmp_path):
    if request.param == "orlop":
        return save_run(tmp_path / "run", (10,)) / "step-00000010"
    return golden(request.param, tmp_path)


def test_version():
    result = apart("--version")
    assert (result.returncode, result.stdout, result.stderr) == (0, f"orlop {__version__}\n", "")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_examples(call, command):
    code, out, _ = call(command, "--help")
    assert code == 0
    assert "Examples:" in out
    assert "--json" in out


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["ls"], ["prune", "x"], ["convert", "x"], ["drill", "--", "true"]]
)
def test_wrong_usage_is_2(call, arguments):
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert err


@pytest.mark.parametrize(
    "arguments",
    [["ls"], ["inspect"], ["verify"], ["diff", "/nowhere/b"], ["convert", "/nowhere/b", "--to", "dcp"]],
)
def test_what_can_not_be_read_is_3_and_one_message(call, arguments):
    command, *rest = arguments
    code, out, err = call(command, "/nowhere/a", *rest)
    assert (code, out) == (3, "")
    assert err.startswith("CheckpointNotFound: ")
    assert "/nowhere/a" in err
    assert "Traceback" not in err


def test_ls(call, run):
    (run / "step-00000020" / ".metadata").unlink()
    code, out, err = call("ls", run)
    assert (code, err) == (0, "")
    first, second = out.splitlines()[1:]
    assert first.split()[:2] == [">", "10"]
    assert first.endswith("complete")
    assert second.endswith("incomplete: .metadata is missing")
    _, out, _ = call("ls", run, "--json")
    rows = json.loads(out)
    assert [(row["step"], row["state"], row["is_next"]) for row in rows] == [
        (10, "complete", True),
        (20, "incomplete", False),
    ]
    assert rows[0]["path"] == str(run / "step-00000010")


def test_ls_verify_finds_damage(call, run):
    flip(data_file(run / "step-00000020"), 0.5)
    assert call("ls", run)[0] == 0
    code, out, _ = call("ls", run, "--verify")
    assert code == 1
    assert "damaged: " in out


def test_inspect(call, checkpoint):
    code, out, err = call("inspect", checkpoint)
    assert (code, err) == (0, "")
    assert "no state yet for 1 parameter: unused" in out
    assert "optimizer.state.*.exp_avg " in out
    assert "lr = 0.01" in call("inspect", checkpoint, "--groups")[1]
    assert ".metadata" in call("inspect", checkpoint, "--files")[1]
    assert "  unused  float32" in call("inspect", checkpoint, "--tree")[1]
    assert len(call("inspect", checkpoint, "*.step")[1].splitlines()) > 2
    content = json.loads(call("inspect", checkpoint, "--json")[1])
    assert content["absent"] == {"optimizer": ["unused"]}
    assert {leaf["leaf"] for leaf in content["leaves"]} >= {"model.unused"}


def test_verify(call, checkpoint):
    code, out, _ = call("verify", checkpoint)
    assert (code, ": sound" in out, "100 %" in out) == (0, True, True)
    content = bytearray(data_file(checkpoint).read_bytes())
    for at in range(len(content) // 3, len(content) // 2):
        content[at] ^= 0xFF
    data_file(checkpoint).write_bytes(content)
    code, out, _ = call("verify", checkpoint, "--json")
    (result,) = json.loads(out)
    assert (code, result["is_sound"]) == (1, False)
    assert len(result["findings"]) > 1
    assert {found["kind"] for found in result["findings"]} <= {"corrupt", "incomplete", "unsafe"}
    assert call("verify", checkpoint)[0] == 1


def test_verify_of_a_run_names_the_damaged_one(call, run):
    data_file(run / "step-00000010").unlink()
    code, out, _ = call("verify", run)
    assert code == 1
    assert "step-00000020: sound" in out
    assert "a data file is missing" in out or "a file is missing" in out


def test_verify_deep_and_against(call, checkpoint):
    assert call("verify", checkpoint, "--deep")[0] == 0
    code, out, _ = call("verify", checkpoint, "--against", "tests.unit.tools.samples:Net")
    is_own = "step-" in checkpoint.name
    assert code == (0 if is_own else 1)
    assert is_own or "model.first.weight: the model has it, the checkpoint has not" in out
    code, out, _ = call("verify", checkpoint, "--against", "torch.nn:Identity")
    assert (code, "unexpected: model.unused" in out) == (1, True)
    assert call("verify", checkpoint, "--against", "tests.unit.tools.samples:Nobody")[0] == 3


def test_diff(call, run):
    one, two = run / "step-00000010", run / "step-00000020"
    assert call("diff", one, one, "--exact")[0] == 0
    code, out, _ = call("diff", one, two)
    assert code == 1
    assert "max ulp" in out
    assert "optimizer.state.first.weight.step" in out
    content = json.loads(call("diff", one, two, "--json")[1])
    assert content["is_same"] is False
    assert {value["leaf"] for value in content["values"]} <= {found["where"] for found in content["findings"]}


@pytest.mark.parametrize("to", ["safetensors", "torch", "dcp"])
def test_convert(call, checkpoint, tmp_path, to):
    out = tmp_path / "out"
    code, text, err = call("convert", checkpoint, out, "--to", to)
    assert (code, err) == (0, "")
    assert str(out) in text
    if to == "dcp":
        assert call("diff", checkpoint, out, "--exact")[0] == 0
    assert call("convert", checkpoint, out, "--to", to)[0] == 3


def test_convert_in_place_index(call, tmp_path):
    path = golden("2.13.0", tmp_path)
    assert call("convert", path, "--in-place-index")[1] == f"{path}: 2 indexes added\n"
    assert call("verify", path)[0] == 0


def test_convert_of_a_damaged_one_is_3_and_leaves_nothing(call, run, tmp_path):
    data_file(run / "step-00000010").unlink()
    code, _, err = call("convert", run / "step-00000010", tmp_path / "out", "--to", "torch")
    assert code == 3
    assert ".distcp" in err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_prune(call, run):
    code, out, _ = call("prune", run, "--keep-last", 1, "--dry-run")
    assert code == 0
    assert out.startswith("would remove 10 (")
    assert (run / "step-00000010").exists()
    content = json.loads(call("prune", run, "--keep-last", 1, "--json")[1])
    assert (content["removed"], content["kept"]) == ([10], [20])
    assert not (run / "step-00000010").exists()


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A current directory of the test's own: a drill looks around there."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("fault, code", [("none", 0), ("forgets", 1)])
def test_drill(call, tmp_path, fault, code):
    command = [sys.executable, STAND_IN, "{run}", 12, 3, fault]
    options = ["--seed", 3, "--during-save", "--out", tmp_path / "out", "--may-write", "my logs"]
    found, out, err = call("drill", *options, "--", *command)
    assert found == code
    assert "killed 2 processes while writing" in err
    assert ("usual cause: " in out, "replay: orlop drill --seed 3" in out) == (code == 1, code == 1)
    assert ("--may-write 'my logs' --out" in out) == (code == 1)
    assert out.splitlines()[-1] == "identical" or code


@pytest.mark.usefixtures("here")
def test_drill_json(call, tmp_path):
    command = [sys.executable, STAND_IN, "{run}", 12, 3, "forgets"]
    options = [
        "--kills",
        1,
        "--seed",
        3,
        "--out",
        tmp_path / "out",
        "--may-write",
        "*.log",
        "--may-write",
        "x",
    ]
    code, out, _ = call("drill", "--json", *options, "--", *command)
    result = json.loads(out)
    assert result["may_write"] == ["*.log", "x"]
    assert (code, result["is_identical"], result["seed"], len(result["kills"])) == (1, False, 3, 1)
    assert "position" in result["hint"]
    (loss,) = [row for row in result["comparisons"] if row["what"] == "loss"]
    assert loss["step"] == result["kills"][0]["published"] + 1
    assert result["runs"] == [str(tmp_path / "out" / name) for name in ("uninterrupted", "killed")]


@pytest.mark.usefixtures("here")
def test_drill_of_a_run_that_saves_elsewhere_is_3(call, tmp_path):
    command = [sys.executable, STAND_IN, "{run}", 12, 3, "saves elsewhere"]
    code, out, err = call("drill", "--json", "--out", tmp_path / "out", "--", *command)
    assert (code, out) == (3, "")
    assert "saves its checkpoints outside of {run}" in err


@pytest.mark.usefixtures("here")
def test_drill_of_a_run_that_writes_elsewhere_is_3(call, tmp_path):
    command = [sys.executable, STAND_IN, "{run}", 12, 3, "logs"]
    code, out, err = call("drill", "--json", "--out", tmp_path / "out", "--", *command)
    assert (code, out) == (3, "")
    assert "train.log\n" in err
    assert "--may-write train.log" in err


@pytest.mark.usefixtures("here")
def test_drill_that_can_not_run_is_3(call, tmp_path):
    code, out, err = call("drill", "--out", tmp_path / "out", "--", "false", "{run}")
    assert (code, out) == (3, "")
    assert "exit code 1" in err


def test_these_commands_need_neither_torch_nor_numpy(run):
    for arguments in (
        ["ls", run, "--verify"],
        ["inspect", run / "step-00000010", "--groups"],
        ["verify", run],
        ["prune", run, "--keep-last", "1"],
    ):
        result = apart(*arguments)
        assert (result.returncode, result.stderr) == (0, "")


def test_ls_and_inspect_start_quickly(run):
    # The budget is 0.3 s. The processor's time, the best of three: neighbours don't count. Torch alone takes 1 s.
    for arguments in (["--help"], ["ls", run], ["inspect", run / "step-00000020"]):
        assert min(_seconds(*arguments) for _ in range(3)) < 0.45, arguments


def _seconds(*arguments):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert apart(*arguments).returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands_and_options(shell):
    words = {"bash": {"COMP_WORDS": "orlop in", "COMP_CWORD": "1"}}.get(
        shell, {"_TYPER_COMPLETE_ARGS": "orlop in"}
    )
    code = "import sys; sys.argv[0] = 'orlop'; from orlop.cli import app; app(prog_name='orlop')"
    environment = {
        **os.environ,
        **words,
        "_ORLOP_COMPLETE": f"complete_{shell}",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment
    )
    assert "inspect" in done.stdout
    assert "verify" not in done.stdout


def test_help_fits_80_columns(call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = call("--help")
    assert not any(line.endswith("...") for line in out.partition("Commands:")[2].splitlines())
    for command in COMMANDS:
        _, out, _ = call(command, "--help")
        examples = out.partition("Examples:")[2].partition("\n\n")[0]
        # Only an example may be longer: it is copied, and does not wrap.
        assert all(len(line) <= 80 for line in out.splitlines() if line not in examples), command
