"""Where a drill looks, and what there is nobody's concern."""

import sys
import tempfile

import pytest

from orlop.tools.drill.surroundings import Surroundings, find_surroundings, matches


def directories(tmp_path, *command):
    found = find_surroundings(command, tmp_path / "out", [tmp_path / "out" / "run"]).directories
    assert found[:2] == (str(tmp_path), str(tmp_path / "out"))
    return list(found[2:])


@pytest.fixture
def far(tmp_path_factory):
    """A directory apart from the current one."""
    return tmp_path_factory.mktemp("far")


def test_the_directories_of_what_the_words_name_are_looked_at(here, far):
    (far / "code").mkdir()
    (far / "code" / "train.py").touch()
    (far / "data").mkdir()
    (here / "link").symlink_to(far)
    script, data = str(far / "code" / "train.py"), f"--data={far / 'data'}"
    assert directories(here, "python", script, data, "none", "--", "") == [
        str(far / "code"),
        str(far / "data"),
    ]
    assert directories(here, "link/code/train.py") == [str(far / "code")]


def test_what_is_in_an_environment_or_all_there_is_is_no_place(here, far):
    (far / "bin").mkdir()
    (far / "bin" / "python").symlink_to(sys.executable)
    (far / "pyvenv.cfg").touch()
    assert directories(here, str(far / "bin" / "python"), "/", "/dev/null") == []


def test_a_script_in_a_temporary_directory_is_at_home_there(here, far, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(far))
    (far / "tmp1" / "code").mkdir(parents=True)
    (far / "tmp1" / "code" / "train.py").touch()
    found = find_surroundings(["python", str(far / "tmp1" / "code" / "train.py")], here / "out", [])
    assert str(far / "tmp1" / "code") in found.directories
    assert found.counts(str(far / "tmp1" / "state"))
    assert not found.counts(str(far / "tmp2" / "state"))


@pytest.mark.parametrize(
    "path, counts",
    [
        ("/data/state", True),
        ("/run/state", False),
        ("/cache/state", False),
        ("/data/__pycache__/a.pyc", False),
        ("/data/a.pyc", False),
        ("/data/.git/index", False),
        ("/dev/shm/a", False),
        ("/proc/1/comm", False),
        ("/temporary/state", True),
        ("/temporary/tmpfile", False),
        ("/temporary/torchinductor_me/a/b", False),
        ("/temporary/pymp-1/a", False),
        ("/data/tmpfile", True),
    ],
)
def test_what_counts(path, counts):
    around = Surroundings(
        directories=("/here",),
        apart=frozenset({"/run"}),
        caches=frozenset({"/cache"}),
        temporary="/temporary",
    )
    assert around.counts(path) == counts


@pytest.mark.parametrize("marker", ["CACHEDIR.TAG", "pyvenv.cfg", ".orlop-drill"])
def test_a_directory_may_say_itself_that_it_does_not_count_but_not_where_the_training_is_at_home(far, marker):
    (far / "deep").mkdir()
    (far / marker).touch()
    assert not Surroundings(directories=("/here",)).counts(str(far / "deep" / "state"))
    assert Surroundings(directories=(str(far / "deep"),)).counts(str(far / "deep" / "state"))


def test_the_users_caches(monkeypatch, far):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CACHE_HOME", str(far))
    around = Surroundings(directories=("/here",))
    assert not any(
        map(around.counts, ["/home/me/.cache/a", "/home/me/.triton/a", "/home/me/.nv/a", f"{far}/a"])
    )
    assert around.counts("/home/me/state")


@pytest.mark.parametrize(
    "pattern, found",
    [
        ("train.log", {"train.log"}),
        ("./*.log", {"train.log", "logs/a.log"}),
        ("logs", {"logs/a.log"}),
        ("logs/", {"logs/a.log"}),
        ("{here}/logs/*", {"logs/a.log"}),
        ("other.log", set()),
        ("*/train.log", set()),
    ],
)
def test_patterns(here, pattern, found):
    paths = ("train.log", "logs/a.log")
    assert {path for path in paths if matches(str(here / path), [pattern.format(here=here)])} == found


def test_a_current_directory_that_looks_like_a_glob(tmp_path, monkeypatch):
    (tmp_path / "run[1]").mkdir()
    monkeypatch.chdir(tmp_path / "run[1]")
    assert matches(str(tmp_path / "run[1]" / "a.log"), ["*.log"])
    assert not matches(str(tmp_path / "run1" / "a.log"), ["*.log"])
