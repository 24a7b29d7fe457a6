"""A stand-in for a training run, without torch: a launcher and a worker in a session of its own.

    stand_in_training.py DIRECTORY STEPS SAVE_EVERY FAULT [worker]

It keeps one number, saves as the store does, and goes on from its newest checkpoint. The fault is `none`, or:
`forgets` something at a resume, `starts anew`, `never saves`, `saves elsewhere`, `fails` at step 3, writes
quickly up to step 8 (`quick`), has two `ranks`. It `logs` into the current directory, `traces` into a
directory in `runs` there that each start gives a name of its own; or to what $STAND_IN_FILE
names, holding it open (`holds`), or each time anew under another name first (`replaces`).
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

HELD = []


def write_elsewhere(fault: str, step: int) -> None:
    if fault == "logs":
        with open("train.log", "a") as log:
            log.write(f"step {step}\n")
    elif fault == "traces":
        path = Path("runs", str(os.getpid()), "events")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    elif fault == "holds":
        file = HELD[0] if HELD else open(os.environ["STAND_IN_FILE"], "a")  # noqa: SIM115
        HELD[:] = [file]
        file.write(f"step {step}\n")
    elif fault == "replaces":
        path = Path(os.environ["STAND_IN_FILE"])
        with path.with_name(f"{path.name}.new").open("w") as file:
            file.write(f"step {step}\n")
            time.sleep(0.1)
        path.with_name(f"{path.name}.new").replace(path)


def save(root: Path, step: int, seconds: float) -> None:
    partial = root / f"step-{step:08d}.partial-here-1-00000000"
    partial.mkdir()
    time.sleep(seconds)
    partial.rename(root / f"step-{step:08d}")


def resume(root: Path) -> tuple[int, list[str]]:
    names = [path.name for path in root.iterdir()]
    for name in names:
        if ".partial-" in name:
            (root / name).rmdir()
    step = max((int(name[5:]) for name in names if re.fullmatch(r"step-\d+", name)), default=0)
    lines = (root / "metrics.jsonl").read_text().splitlines() if step else []
    return step, [line for line in lines if json.loads(line)["step"] <= step]


def train(root: Path, steps: int, save_every: int, fault: str) -> None:
    place = root.parent / "elsewhere" if fault == "saves elsewhere" else root
    place.mkdir(exist_ok=True)
    step, lines = (0, []) if fault == "starts anew" else resume(root)
    forgot = fault == "forgets" and step > 0
    while step < steps:
        step += 1
        loss = 1 / (step + forgot)
        lines.append(json.dumps({"step": step, "loss": loss, "grad_norm": 1.0, "lr": [0.1], "tokens": step}))
        # A kill may hit in the middle of a write: the file is replaced whole.
        (root / "metrics.new").write_text("\n".join(lines) + "\n")
        (root / "metrics.new").replace(root / "metrics.jsonl")
        write_elsewhere(fault, step)
        time.sleep(0.15 if fault == "quick" else 0.03)
        if fault == "fails" and step == 3:
            sys.exit("something went wrong")
        is_new = not (place / f"step-{step:08d}").exists()
        if step % save_every == 0 and is_new and fault != "never saves":
            save(place, step, seconds=0.1 if fault == "quick" and step <= 8 else 0.3)
    names = ("model.w", "optimizer.state.w.exp_avg", "optimizer.state.w.step", "rng.rank_0")
    leaves = {**dict.fromkeys(names, "00"), "data.rank_0": "02" if forgot else "01"}
    (root / "fingerprint.json").write_text(json.dumps({"step": step, "leaves": leaves}))


def launch() -> int:
    """One worker; or, by the fault `ranks`, two of which the second waits. As one ends, the other is ended."""
    count = 2 if sys.argv[4] == "ranks" else 1
    workers = [
        subprocess.Popen(
            [sys.executable, *sys.argv, "worker"],
            start_new_session=True,
            env={**os.environ, "RANK": str(rank)},
        )
        for rank in range(count)
    ]
    while all(worker.poll() is None for worker in workers):
        time.sleep(0.01)
    codes = [worker.poll() for worker in workers]
    for worker in workers:
        worker.kill()
        worker.wait()
    return next(code for code in codes if code is not None)


if __name__ == "__main__":
    if sys.argv[-1] != "worker":
        sys.exit(launch())
    if os.environ["RANK"] != "0":
        time.sleep(600)
    train(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
