"""`verify --against`: a user's own function makes the model, and whatever is wrong with it is one clear message."""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.unit.tools import samples
from tests.unit.tools.samples import golden

import orlop

MODELS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        for name, shape in (("matrix", (5, 3)), ("single", (1,)), ("unused", (2, 2))):
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

def wrapped():
    return nn.ModuleDict({"module": Net()})

def half():
    return Net().half()

def other():
    model = Net()
    model.matrix = nn.Parameter(torch.zeros(5, 4))
    model.extra = nn.Linear(2, 2)
    del model.single
    return model

def huge():
    return nn.Linear(1 << 20, 1 << 20)

def needs(config):
    return Net()

def fails():
    raise RuntimeError("no config\\nmore of it")

def three():
    return 3
"""


@pytest.fixture
def verify(call, tmp_path, monkeypatch):
    """`verify --against SPEC` of a plain checkpoint, in a directory with the user's modules."""
    path = golden("2.15.0", tmp_path / "golden")
    (tmp_path / "models_of_test.py").write_text(MODELS)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "models_below_of_test.py").write_text(MODELS)
    (tmp_path / "script_of_test.py").write_text("import sys; sys.exit(2)")
    (tmp_path / "torn_of_test.py").write_text("def build(:")
    (tmp_path / "needs_of_test.py").write_text("import nowhere_of_test")
    monkeypatch.chdir(tmp_path)
    return lambda spec, *more: call("verify", path, "--against", spec, *more)


@pytest.mark.parametrize(
    "spec", ["models_of_test:Net", "models_of_test.py:Net", "sub/models_below_of_test.py:Net"]
)
def test_the_model_that_was_saved(verify, spec):
    code, out, err = verify(spec)
    assert (code, err) == (0, "")
    assert out.splitlines()[0].endswith("nested: sound")


@pytest.mark.parametrize(
    "function, findings",
    [
        ("half", [("dtype", f"model.{name}") for name in ("matrix", "single", "unused")]),
        (
            "other",
            [
                ("shape", "model.matrix"),
                ("missing", "model.extra.weight"),
                ("missing", "model.extra.bias"),
                ("unexpected", "model.single"),
            ],
        ),
        ("wrapped", [("names", "model")]),
        ("huge", [("names", "model")]),  # 4 TiB, on the meta device
    ],
)
def test_another_model(verify, function, findings):
    code, out, err = verify(f"models_of_test:{function}", "--json")
    (result,) = json.loads(out)
    assert (code, err, result["is_sound"]) == (1, "", False)
    assert [(found["kind"], found["where"]) for found in result["findings"]] == findings


@pytest.mark.parametrize(
    "spec, said",
    [
        (
            "models_of_test:needs",
            "the function fails: models_of_test:needs\n  found: TypeError: needs() missing 1",
        ),
        (
            "models_of_test:fails",
            "the function fails: models_of_test:fails\n  found: RuntimeError: no config\n",
        ),
        ("models_of_test:three", "it makes no torch.nn.Module: models_of_test:three\n  found: int"),
        ("models_of_test:nobody", "there is no such function: models_of_test:nobody"),
        (
            "nowhere_of_test:build",
            "the module can't be imported: nowhere_of_test:build\n  found: ModuleNotFoundError: No module named",
        ),
        ("sub/nowhere_of_test.py:build", "there is no such file: {here}/sub/nowhere_of_test.py\n"),
        (
            "needs_of_test.py:build",
            "can't be imported: needs_of_test.py:build\n  found: ModuleNotFoundError: ",
        ),
        ("script_of_test.py:main", "can't be imported: script_of_test.py:main\n  found: SystemExit: 2"),
        ("torn_of_test:build", "can't be imported: torn_of_test:build\n  found: SyntaxError: "),
    ],
)
def test_a_function_that_is_of_no_use_is_one_message_before_anything_is_read(verify, tmp_path, spec, said):
    code, out, err = verify(spec)
    assert (code, out) == (3, "")
    assert said.replace("{here}", str(tmp_path)) in err
    assert "Traceback" not in err


@pytest.mark.parametrize("spec", ["models_of_test", "models_of_test:", ":Net"])
def test_a_spec_of_another_form_is_wrong_usage(verify, spec):
    code, out, err = verify(spec)
    assert (code, out) == (2, "")
    assert "module:function" in err


def test_weights_at_the_top_beside_an_optimizer(call, tmp_path, monkeypatch):
    """As torchtitan saves them."""
    linear = torch.nn.Linear(2, 2)
    state = {**linear.state_dict(), "optimizer": {"state": {"weight": {"exp_avg": torch.ones(2, 2)}}}}
    state["optimizer"]["param_groups"] = [{"lr": 0.1, "params": ["weight", "bias"]}]
    dcp.save({**state, "train_state": {"step": torch.tensor(3)}}, checkpoint_id=tmp_path / "x")
    (tmp_path / "top_of_test.py").write_text(
        "from torch import nn\n\ndef build():\n    return nn.Linear(2, 2)\n"
    )
    monkeypatch.chdir(tmp_path)
    code, out, _ = call("verify", "x", "--against", "top_of_test:build")
    assert (code, out.splitlines()[0]) == (0, "x: sound")


def test_what_is_wrong_with_weights_at_the_top_is_named_as_it_stands_there(call, tmp_path, monkeypatch):
    entries = {"model.weight": torch.ones(3, 2), "model.old": torch.ones(2), "count": torch.tensor(3)}
    dcp.save(entries, checkpoint_id=tmp_path / "x")
    (tmp_path / "named_model_of_test.py").write_text(
        "from torch import nn\n\ndef build():\n    return nn.ModuleDict({'model': nn.Linear(2, 2)})\n"
    )
    monkeypatch.chdir(tmp_path)
    code, out, _ = call("verify", "x", "--against", "named_model_of_test:build", "--json")
    (result,) = json.loads(out)
    assert code == 1
    assert [(found["kind"], found["where"]) for found in result["findings"]] == [
        ("shape", "model.weight"),
        ("missing", "model.bias"),
        ("unexpected", "model.old"),
    ]


def test_what_was_left_out_on_purpose_is_not_missing(call, tmp_path, monkeypatch):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[0].requires_grad_(False)
    engine = orlop.TrainEngine(model, orlop.SwapAdamW(model[1].parameters(), lr=0.1))
    engine.save_dcp(tmp_path / "x", include_frozen=False)
    (tmp_path / "frozen_of_test.py").write_text(
        "from torch import nn\n\ndef build(count=2):\n"
        "    return nn.Sequential(*[nn.Linear(2, 2) for _ in range(count)])\n\n"
        "def longer():\n    return build(3)\n"
    )
    monkeypatch.chdir(tmp_path)
    code, out, _ = call("verify", "x", "--against", "frozen_of_test:build")
    assert (code, out.splitlines()[0]) == (0, "x: sound")
    code, out, _ = call("verify", "x", "--against", "frozen_of_test:longer")
    assert (code, out.splitlines()[0]) == (1, "x: 2 findings")
    assert "model.2.weight" in out


def test_a_tied_weight_is_not_missing(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    samples.engine().save_dcp(tmp_path / "x")
    code, out, _ = call("verify", "x", "--against", "tests.unit.tools.samples:Net")
    assert (code, out.splitlines()[0]) == (0, "x: sound")
