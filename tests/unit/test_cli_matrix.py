"""Every command on every kind of checkpoint: orlop's own, plain DCP of all torch versions, and damaged ones.

Exit codes as documented: 0 fine, 1 findings, 3 can't be read. (2, wrong usage, is `test_cli`'s.)
"""

import json
import pickle
import shutil

import pytest
import torch.distributed.checkpoint as dcp
from tests.unit.tools.samples import data_file, golden, save_run
from tests.unit.tools.test_check import Trap

from orlop.dcp.archive import locate_tensor
from orlop.tools.opened import Opened

VERSIONS = ("2.6.0", "2.9.1", "2.10.0", "2.13.0", "2.15.0")
PLAIN = [f"{version}-{layout}" for version in VERSIONS for layout in ("nested", "flattened")]
OLD, NEW = "step-00000010", "step-00000020"


def make_run(kind, folder):
    """A run with two checkpoints of that kind; plain ones are the same twice."""
    if kind == "orlop":
        return save_run(folder / "run", (10, 20))
    version, layout = kind.split("-")
    source = golden(version, folder / "golden", layout)
    for name in (OLD, NEW):
        shutil.copytree(source, folder / "run" / name)
    return folder / "run"


@pytest.fixture(params=["orlop", *PLAIN])
def run(request, tmp_path):
    return make_run(request.param, tmp_path)


def is_own(run):
    return (run / OLD / "orlop.json").exists()


# -- sound ones --------------------------------------------------------------------------------------------------------


def test_ls(call, run):
    code, out, err = call("ls", run, "--verify")
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()[1:]] == ["10", ">"]
    rows = json.loads(call("ls", run, "--verify", "--json")[1])
    assert [(row["step"], row["state"], row["is_next"]) for row in rows] == [
        (10, "verified", False),
        (20, "verified", True),
    ]
    assert all((row["world_size"] is not None) == is_own(run) for row in rows)


@pytest.mark.parametrize("view", ["", "--groups", "--files", "--tree", "--tensors", "exp_avg"])
def test_inspect(call, run, view):
    code, out, err = call("inspect", run / NEW, *[view] * bool(view))
    assert (code, err) == (0, "")
    expected = {"--groups": "lr = 0.01", "--files": ".distcp", "--tree": "  unused  float32"}
    assert expected.get(view, "exp_avg") in out
    assert "unchecked" not in out


def test_inspect_json(call, run):
    code, out, err = call("inspect", run / NEW, "--json")
    assert (code, err) == (0, "")
    content = json.loads(out)
    assert (content["manifest"] is not None) == is_own(run)
    assert content["absent"] == {"optimizer": ["unused"]}
    assert sum(part["num_leaves"] for part in content["parts"]) == len(content["leaves"]) > 20
    assert {group["options"]["lr"] for group in content["groups"]} >= {0.01}
    assert {".metadata", "__0_0.distcp"} <= {row["name"] for row in content["files"]}


def test_inspect_of_a_run_shows_the_newest_and_says_so(call, run):
    code, out, err = call("inspect", run)
    assert (code, out) == (0, call("inspect", run / NEW)[1])
    assert err == f"{run} is a run with 2 checkpoints; this is its newest complete one\n"


def test_verify(call, run):
    code, out, err = call("verify", run)
    assert (code, err) == (0, "")
    assert out.count(": sound\n") == 2
    assert out.count(" 100 % of it against checksums") == 2
    results = json.loads(call("verify", run, "--json")[1])
    assert all(result["is_sound"] and result["bytes_checked"] == result["bytes_read"] for result in results)
    assert call("verify", run / NEW, "--deep")[0] == 0


def test_diff(call, run):
    code, out, err = call("diff", run / OLD, run / OLD, "--exact", "--json")
    content = json.loads(out)
    assert (code, err, content["is_same"], content["findings"]) == (0, "", True, [])
    assert content["num_identical"] == content["num_compared"] > 10
    code, out, _ = call("diff", run / OLD, run / NEW, "--exact")
    assert (code, out.startswith("different: ")) == ((1, True) if is_own(run) else (0, False))


@pytest.mark.parametrize("to", ["safetensors", "torch", "dcp"])
def test_convert(call, run, tmp_path, to):
    out = tmp_path / "out"
    code, text, err = call("convert", run / NEW, out, "--to", to, "--json")
    assert (code, err) == (0, "")
    result = json.loads(text)
    assert result["path"] == str(out)
    assert result["nbytes"] == sum(path.stat().st_size for path in (out.iterdir() if out.is_dir() else [out]))
    if to == "dcp":
        assert call("diff", run / NEW, out, "--exact")[0] == 0
        assert call("verify", out, "--deep")[0] == 0


def test_convert_in_place_index(call, run):
    code, text, _ = call("convert", run / NEW, "--in-place-index", "--json")
    assert (code, len(json.loads(text)["added"])) == (0, 0 if is_own(run) else 2)
    assert call("verify", run / NEW)[0] == 0


def test_prune(call, run):
    code, text, err = call("prune", run, "--keep-last", 1, "--json")
    result = json.loads(text)
    assert (code, err, result["removed"], result["kept"], result["dry_run"]) == (0, "", [10], [20], False)
    assert [path.name for path in run.iterdir()] == [NEW]


# -- damaged ones ------------------------------------------------------------------------------------------------------


def flip_in_leaf(checkpoint):
    """One bit of a model's tensor."""
    extents = Opened(checkpoint).catalog.extents
    extent = next(extent for (leaf, _), extent in sorted(extents.items()) if leaf.startswith("model."))
    content = bytearray((checkpoint / extent.path).read_bytes())
    record = bytes(content[extent.offset : extent.offset + extent.nbytes])
    found = locate_tensor(lambda at, nbytes: record[at : at + nbytes], len(record), "here")
    content[extent.offset + found.data_at] ^= 0x10
    (checkpoint / extent.path).write_bytes(content)


def cut(path, part):
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])


DAMAGE = {
    "data file missing": lambda path: data_file(path).unlink(),
    "data file empty": lambda path: cut(data_file(path), 0),
    "data file cut": lambda path: cut(data_file(path), 0.3),
    "bit flipped": flip_in_leaf,
    "metadata missing": lambda path: (path / ".metadata").unlink(),
    "metadata empty": lambda path: cut(path / ".metadata", 0),
    "metadata cut": lambda path: cut(path / ".metadata", 0.7),
    "metadata hostile": lambda path: (path / ".metadata").write_bytes(
        pickle.dumps(Trap(str(path / "executed")))
    ),
}
OWN_DAMAGE = {
    "manifest cut": lambda path: cut(path / "orlop.json", 0.5),
    "index missing": lambda path: next(path.glob("*.index.json")).unlink(),
    "index cut": lambda path: cut(next(path.glob("*.index.json")), 0.5),
}
CASES = [(kind, damage) for kind in ("orlop", "2.6.0-nested", "2.15.0-flattened") for damage in DAMAGE]
CASES += [("orlop", damage) for damage in OWN_DAMAGE]
UNREADABLE = {damage for damage in DAMAGE if damage.startswith("metadata")} | {"manifest cut"}


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-{case[1].replace(' ', '-')}")
def damaged(request, tmp_path):
    """A run whose older checkpoint is damaged, and how; nothing of it was executed in the end."""
    kind, damage = request.param
    run = make_run(kind, tmp_path)
    {**DAMAGE, **OWN_DAMAGE}[damage](run / OLD)
    yield run, damage
    assert not (run / OLD / "executed").exists()


def test_damaged_verify(call, damaged):
    run, damage = damaged
    code, out, err = call("verify", run / OLD)
    assert (code, err) == (1, "")
    assert " finding" in out.splitlines()[0]
    sound = {result["path"]: result["is_sound"] for result in json.loads(call("verify", run, "--json")[1])}
    assert sound == {str(run / OLD): False, str(run / NEW): True}
    (result,) = json.loads(call("verify", run / OLD, "--json")[1])
    faults = [finding for finding in result["findings"] if finding["is_fault"]]
    file = {"m": ".metadata", "d": ".distcp", "b": ".distcp", "i": ".index.json"}[damage[0]]
    assert any(("orlop.json" if damage == "manifest cut" else file) in fault["where"] for fault in faults)
    assert ("unsafe" in {fault["kind"] for fault in faults}) == (
        damage == "metadata hostile" and not own(run)
    )


def own(run):
    """orlop's own, which is not unpickled at all: by its digest it is not the file that was written."""
    return is_own(run)


def test_damaged_ls(call, damaged):
    run, damage = damaged
    code, out, err = call("ls", run)
    assert (code, err) == (0, "")
    old, new = out.splitlines()[1:]
    assert new.split()[0] == ">"
    code, text, _ = call("ls", run, "--verify", "--json")
    states = [row["state"] for row in json.loads(text)]
    assert (code, states[1]) == (1, "verified")
    assert states[0] in ("damaged", "incomplete")
    # What names and sizes show is shown without --verify as well.
    assert damage == "bit flipped" or not is_own(run) or "damaged: " in old or "incomplete: " in old


def test_damaged_inspect(call, damaged):
    run, damage = damaged
    code, out, err = call("inspect", run / OLD)
    if damage in UNREADABLE:
        assert (code, out) == (3, "")
    elif is_own(run) or damage == "bit flipped":
        assert (code, err) == (0, "")
    else:  # the param groups are in the file that is gone; the rest is shown
        assert (code, "optimizer.state.*.exp_avg " in out, ".distcp" in err) == (3, True, True)
    assert err.startswith("Checkpoint") == (code == 3)
    assert "Traceback" not in err


def test_damaged_diff(call, damaged):
    run, _ = damaged
    sides = [run / OLD, run / NEW]
    for one, two in (sides, sides[::-1]):
        code, out, err = call("diff", one, two, "--json")
        assert (code, out) == (3, "")
        assert err.startswith("Checkpoint")
        assert OLD in err or ".distcp" in err


@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_damaged_convert(call, damaged, tmp_path, to):
    run, _ = damaged
    room = tmp_path / "room"
    room.mkdir()
    code, out, err = call("convert", run / OLD, room / "out", "--to", to)
    assert (code, out) == (3, "")
    assert err.startswith("Checkpoint")
    assert list(room.iterdir()) == []


def test_damaged_convert_in_place_index(call, damaged):
    run, _ = damaged
    before = {path.name: path.read_bytes() for path in (run / OLD).iterdir()}
    code, out, err = call("convert", run / OLD, "--in-place-index")
    assert (code, out) == (3, "")
    assert err.startswith("Checkpoint")
    assert {path.name: path.read_bytes() for path in (run / OLD).iterdir()} == before


def test_damaged_prune(call, damaged):
    run, _ = damaged
    whole = [row["step"] for row in json.loads(call("ls", run, "--json")[1]) if row["state"] == "complete"]
    code, text, err = call("prune", run, "--keep-last", 1, "--json")
    result = json.loads(text)
    assert (code, err, result["kept"]) == (0, "", [20])
    assert (run / OLD).exists() == (10 not in whole)


C05 = {
    "no metadata": (lambda path: (path / ".metadata").unlink(), ".metadata is missing"),
    "metadata without content": (lambda path: cut(path / ".metadata", 0), ".metadata has no content"),
    "a shard is missing": (lambda path: data_file(path).unlink(), ".distcp is missing"),
    "a shard without content": (lambda path: cut(data_file(path), 0), ".distcp has 0 bytes instead of"),
    "empty": (lambda path: [each.unlink() for each in path.iterdir()], "it is empty"),
    "only temporary files": (
        lambda path: [
            each.rename(path / ".metadata.tmp") if each.name == ".metadata" else each.unlink()
            for each in path.iterdir()
        ],
        "it holds only temporary files (.metadata.tmp)",
    ),
}


@pytest.mark.parametrize("name", C05)
def test_c05_what_a_resume_passes_over_is_listed_with_its_reason(call, tmp_path, name):
    damage, reason = C05[name]
    run = make_run("orlop", tmp_path)
    damage(run / NEW)
    code, out, _ = call("ls", run)
    old, new = out.splitlines()[1:]
    assert (code, old.split()[0]) == (0, ">")
    assert f"incomplete: {reason}" in new or f"incomplete: __0_0{reason}" in new
    assert call("ls", run, "--verify")[0] == 1
    code, out, _ = call("verify", run)
    assert (code, "step-00000010: sound" in out) == (1, True)
    assert call("verify", run / NEW)[0] == 1
    assert call("inspect", run)[1] == call("inspect", run / OLD)[1]
    assert call("convert", run / NEW, tmp_path / "out", "--to", "torch")[0] == 3
    removed = json.loads(call("prune", run, "--keep-last", 1, "--json")[1])
    assert (removed["removed"], removed["kept"], removed["passed_over"]) == ([], [10], [20])


def test_f04_a_hostile_byte_leaf_is_never_executed_by_any_command(call, tmp_path):
    path, marker = tmp_path / "run" / OLD, tmp_path / "executed"
    dcp.save({"model": {"trap": Trap(str(marker))}}, checkpoint_id=path)
    codes = {
        command: call(command, path, *more)[0]
        for command, more in (
            ("inspect", ["--tree"]),
            ("verify", []),
            ("diff", [path]),
            ("convert", [tmp_path / "out", "--to", "torch"]),
        )
    }
    assert codes == {"inspect": 0, "verify": 1, "diff": 0, "convert": 3}
    assert call("verify", path, "--deep")[0] == 1
    assert call("ls", path.parent, "--verify")[0] == 1
    assert not marker.exists()
    assert not (tmp_path / "out").exists()
