"""A real training loop, broken in each of the usual ways: the drill says so, and names the cause."""

import sys
from pathlib import Path

import pytest
from tests.unit.tools.drill.test_drilling import Heard

from orlop.tools.drill import drilling
from orlop.tools.drill.drilling import DrillOptions, drill
from orlop.tools.drill.kills import Kill

SCRIPT = Path(__file__).with_name("broken_training.py")
HINTS = {
    "seeds again": "random streams are not restored",
    "no sampler": "no data position is saved",
    "sampler": "the data's position is not restored",
    "schedule": "the learning rate's schedule is off",
    "moments": "moments are not restored exactly",
    "order": "data order",
}
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("fault", HINTS)
def test_the_hint_names_the_usual_cause(tmp_path, monkeypatch, fault):
    monkeypatch.setattr(drilling, "plan_kills", lambda *_, **__: [Kill(moment="between steps", step=6)])
    command = [sys.executable, str(SCRIPT), "{run}", fault]
    result = drill(command, DrillOptions(out=tmp_path / "out", kills=1), Heard())
    assert not result.is_identical
    assert HINTS[fault] in result.hint, result.rows
    # The records are the same up to the resume, and differ from then on.
    went_on_from = result.kills[0].published
    assert went_on_from in (4, 8)  # where the machine is busy, the kill strikes some steps later
    assert min(row.step for row in result.rows if row.step is not None) == went_on_from + 1
