"""What a run left outside of its directory is found, wherever it is; what others write is not."""

import os
import shutil
import subprocess
import sys

import pytest

from orlop.tools.drill.elsewhere import Lookout, OpenFiles, Snapshot, find_changes, take_snapshot
from orlop.tools.drill.surroundings import Surroundings, matches

ONE, TWO = (1, 10, 5), (1, 11, 5)


def snapshot(files, **below):
    directories = {"/here": True, **{f"/here/{name}": looked for name, looked in below.items()}}
    return Snapshot(files=files, directories=directories)


@pytest.mark.parametrize(
    "before, after, found",
    [
        ({"/here/a": ONE}, {"/here/a": ONE}, set()),
        ({}, {"/here/a": ONE}, {"/here/a"}),
        ({"/here/a": ONE}, {"/here/a": TWO}, {"/here/a"}),
        ({"/here/a": ONE}, {}, {"/here/a"}),
    ],
)
def test_new_changed_and_gone(before, after, found):
    assert find_changes(snapshot(before), snapshot(after)) == found


def test_what_one_of_two_snapshots_passed_over_is_no_change():
    file = {"/here/large/deep/a": ONE}
    looked, passed = snapshot(file, large=True), snapshot({}, large=False)
    assert find_changes(passed, looked) == find_changes(looked, passed) == set()
    # A directory that was not there is none that was passed over.
    assert find_changes(snapshot({}), looked) == find_changes(looked, snapshot({})) == set(file)


def test_a_snapshot_holds_files_and_links_but_not_what_the_links_lead_to(tmp_path):
    (tmp_path / "here" / "deep").mkdir(parents=True)
    (tmp_path / "here" / "deep" / "a").write_text("x")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "b").write_text("x")
    (tmp_path / "here" / "link").symlink_to(tmp_path / "there")
    here = str(tmp_path / "here")
    # The deeper one is a place as well: it is looked at once.
    found = take_snapshot(Surroundings(directories=(here, f"{here}/deep")), 10)
    assert set(found.files) == {f"{here}/deep/a", f"{here}/link"}
    assert found.directories == {here: True, f"{here}/deep": True}
    assert found.is_whole


def test_a_directory_that_is_too_large_is_passed_over_and_the_others_are_not(tmp_path):
    for name, count in (("a", 1), ("large", 10), ("z", 1)):
        (tmp_path / name).mkdir()
        for number in range(count):
            (tmp_path / name / str(number)).touch()
    found = take_snapshot(Surroundings(directories=(str(tmp_path),)), 8)
    assert sorted(found.files) == [str(tmp_path / "a" / "0"), str(tmp_path / "z" / "0")]
    assert (found.directories[str(tmp_path / "large")], found.is_whole) == (False, False)


def test_a_directory_that_becomes_a_cache_is_no_change(tmp_path):
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "a").touch()
    here = Surroundings(directories=(str(tmp_path),))
    before = take_snapshot(here, 10)
    (tmp_path / "made" / "CACHEDIR.TAG").touch()
    assert find_changes(before, take_snapshot(here, 10)) == set()


@pytest.fixture
def lookout(tmp_path, here):
    """A lookout in a directory of its own, and files elsewhere that are older than it."""
    (tmp_path / "here").mkdir()
    for name in ("old", "mapped"):
        (tmp_path / name).write_text("x")
        os.utime(tmp_path / name, (1e9, 1e9))
    return Lookout(
        Surroundings(directories=(str(tmp_path / "here"),), apart=frozenset({str(tmp_path / "run")}))
    )


def held(*paths):
    return {str(path): path.stat().st_ino for path in paths}


def test_of_held_files_those_count_that_were_written_and_still_stand(lookout, tmp_path):
    for place in ("run", "cache"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "a").write_text("x")
    (tmp_path / "cache" / "CACHEDIR.TAG").touch()
    (tmp_path / "gone").write_text("x")
    seen = held(*(tmp_path / name for name in ("old", "mapped", "run/a", "cache/a", "gone")))
    (tmp_path / "gone").unlink()
    assert lookout.find(seen) == []
    (tmp_path / "old").write_text("y")
    (tmp_path / "here" / "new").write_text("x")
    assert lookout.find(seen) == [str(tmp_path / "here" / "new"), str(tmp_path / "old")]


def test_a_held_file_is_found_under_its_new_name(lookout, tmp_path):
    partial = tmp_path / "far" / "step.partial"
    partial.mkdir(parents=True)
    (partial / "a").write_text("x")
    seen = held(partial / "a")
    partial.rename(tmp_path / "far" / "step")
    assert lookout.find(seen) == [str(tmp_path / "far" / "step" / "a")]
    shutil.rmtree(tmp_path / "far")
    assert lookout.find(seen) == []


def test_a_file_that_is_written_anew_again_and_again_is_found_by_its_name(lookout, tmp_path):
    (tmp_path / "other.json").write_text("x")
    (tmp_path / "state.json").write_text("x")
    assert lookout.find({str(tmp_path / "state.json.tmp"): 1}) == [str(tmp_path / "state.json")]


def test_what_another_process_writes_already_is_not_the_runs(tmp_path):
    with (tmp_path / "drill.log").open("w") as log:
        found = Lookout(Surroundings(directories=(str(tmp_path),)))
        log.write("killed one process")
    assert found.find({}) == []


@pytest.mark.parametrize(
    "stands, written, patterns",
    [
        ([], ["runs/1/events", "runs/1/more"], ["runs"]),
        (["runs"], ["runs/2/a/events", "runs/2/events"], ["runs/*"]),
        (["runs"], ["runs/summary"], ["runs/summary"]),
        ([], ["a.log", "wandb/run-1/log"], ["a.log", "wandb"]),
        (["run[1]"], ["run[1]/2/a"], ["run[[]1]/*"]),
    ],
)
def test_the_patterns_also_match_what_the_next_run_names_otherwise(here, stands, written, patterns):
    for directory in stands:
        (here / directory).mkdir()
    lookout = Lookout(Surroundings(directories=(str(here),)))
    for name in written:
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).touch()
    found = lookout.find({})
    assert found == [str(here / name) for name in written]
    assert lookout.patterns(found) == patterns
    assert all(matches(path, patterns) for path in found)


def test_the_pattern_of_a_file_where_nobody_looked_is_the_file(lookout, tmp_path):
    (tmp_path / "far").mkdir()
    assert lookout.patterns([str(tmp_path / "far" / "a")]) == ["far/a"]


HOLDER = """
import sys, time
files = [open(sys.argv[1] + name, mode) for name, mode in (("/w", "w"), ("/a", "a"), ("/rw", "r+"), ("/r", "r"))]
print("open", flush=True)
time.sleep(60)
"""


def test_only_files_that_are_open_for_writing_are_seen(tmp_path):
    for name in ("rw", "r"):
        (tmp_path / name).touch()
    child = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert child.stdout.readline() == b"open\n"
        (tmp_path / "w").unlink()
        open_files = OpenFiles()
        open_files.look(child.pid)
        assert open_files.inodes == held(tmp_path / "a", tmp_path / "rw")
    finally:
        child.kill()
        child.communicate()
