"""A run's checkpoints: listed with their states, and pruned by the store's own rule."""

import shutil

import pytest
from tests.unit.tools.samples import data_file, flip, golden, save_run

from orlop.errors import CheckpointNotFound
from orlop.store import catalog
from orlop.tools.check import check_checkpoint
from orlop.tools.prune import prune
from orlop.tools.run import list_run


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_run(tmp_path_factory.mktemp("saved"), (10, 20, 30, 40))


@pytest.fixture
def run(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "run")


def states(run, **options):
    return {row.step: (row.state, row.is_next) for row in list_run(run, **options)}


def test_all_complete(run):
    assert states(run) == {
        10: ("complete", False),
        20: ("complete", False),
        30: ("complete", False),
        40: ("complete", True),
    }


def test_c05_every_unusable_one_is_listed_with_its_reason(run):
    (run / "step-00000040" / ".metadata").unlink()
    data_file(run / "step-00000030").unlink()
    (run / "step-00000050").mkdir()
    name = catalog.unpublished_name("step-00000060", kind="partial", host="h", pid=1, token="0" * 8)
    (run / name).mkdir()
    rows = {row.step: row for row in list_run(run)}
    assert [rows[step].state for step in (10, 20, 30, 40, 50, 60)] == ["complete"] * 2 + [
        "incomplete"
    ] * 3 + ["partial"]
    assert ".metadata is missing" in rows[40].reason
    assert ".distcp is missing" in rows[30].reason
    assert "empty" in rows[50].reason
    assert "process 1 on h" in rows[60].reason
    assert [step for step, row in rows.items() if row.is_next] == [20]


def test_verify_finds_what_sizes_do_not_show(run):
    flip(data_file(run / "step-00000040"), 0.5)
    assert states(run)[40] == ("complete", True)
    found = states(run, verify=True)
    assert found[40] == ("damaged", False)
    assert found[30] == ("verified", True)


def test_runs_of_plain_dcp_are_listed(tmp_path):
    golden("2.6.0", tmp_path)
    (tmp_path / "nested").rename(tmp_path / "step-7")
    (row,) = list_run(tmp_path, verify=True)
    assert (row.step, row.state, row.created, row.world_size) == (7, "verified", None, None)


def test_a_checkpoint_is_no_run(run):
    with pytest.raises(CheckpointNotFound, match="step-00000040"):
        list_run(run / "step-00000040")
    with pytest.raises(CheckpointNotFound, match="nowhere"):
        list_run(run / "nowhere")


def test_prune_keeps_the_newest_and_the_multiples(run):
    before = set(run.iterdir())
    planned = prune(run, keep_last=1, keep_every=20, dry_run=True)
    assert (planned.removed, planned.kept) == ([10, 30], [20, 40])
    assert set(run.iterdir()) == before
    assert prune(run, keep_last=1, keep_every=20) == planned
    assert sorted(path.name for path in run.iterdir()) == ["step-00000020", "step-00000040"]


@pytest.mark.parametrize("dry_run", [True, False])
def test_prune_never_takes_the_newest_sound_one(run, dry_run):
    for step in (30, 40):
        flip(data_file(run / f"step-000000{step}"), 0.5)
    result = prune(run, keep_last=1, dry_run=dry_run)
    assert (result.removed, result.kept, result.damaged) == ([10], [20, 30, 40], [40, 30])
    assert check_checkpoint(run / "step-00000020").is_sound
    for step in (10, 20):
        if (run / f"step-000000{step}").exists():
            flip(data_file(run / f"step-000000{step}"), 0.5)
    assert prune(run, keep_last=1).removed == []


def test_prune_leaves_incomplete_ones_and_counts_without_them(run):
    (run / "step-00000040" / ".metadata").unlink()
    result = prune(run, keep_last=1)
    assert (result.removed, result.kept, result.passed_over) == ([10, 20], [30], [40])
    assert (run / "step-00000040").exists()


def test_prune_leaves_what_is_being_read(run):
    from orlop.store.roots import root_at

    with root_at(run).reading("step-00000010"):
        result = prune(run, keep_last=1)
    assert (result.removed, result.busy) == ([20, 30], [10])
    assert (run / "step-00000010").exists()


def test_prune_refuses_nonsense(run, tmp_path):
    with pytest.raises(ValueError, match="keep_last"):
        prune(run, keep_last=0)
    with pytest.raises(CheckpointNotFound, match="run"):
        prune(run / "step-00000010", keep_last=1)
    assert len(list(run.iterdir())) == 4


def test_an_object_store_is_listed_verified_and_pruned(tmp_path):
    run = f"memory://bucket{tmp_path}"
    save_run(run, (10, 20))
    assert states(run, verify=True) == {10: ("verified", False), 20: ("verified", True)}
    assert check_checkpoint(f"{run}/step-00000010").bytes_checked > 0
    assert prune(run, keep_last=1).removed == [10]
    assert states(run) == {20: ("complete", True)}
