"""The pipeline over the thread link: the stock bits whatever the timing, the cap kept, nothing read too early."""

from __future__ import annotations

import copy
import json
import threading
import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import orlop
from orlop.errors import OptimizerRefused, StateNotReady
from orlop.testing import ThreadLink

HOST = torch.device("cpu")
SHAPES = [(40, 7), (3000,), (), (5,), (64, 3), (1, 1)]


def make_params():
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def give_gradients(params, number):
    generator = torch.Generator().manual_seed(number)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)


def pair(link, *, window_bytes, optimizer_class=torch.optim.AdamW, **kwargs):
    params, others = make_params(), make_params()
    swapped = orlop.swap(optimizer_class)(params, window_bytes=window_bytes, **kwargs)
    swapped.links[HOST] = link
    kwargs.pop("step_in_backward", None)
    return (params, swapped), (others, optimizer_class(others, **kwargs))


def assert_same(swapped, stock, params, others):
    for param, other in zip(params, others):
        assert torch.equal(param, other)
        for key, value in stock.state[other].items():
            assert torch.equal(swapped.state[param][key], value), key


def train(mine, theirs, steps=3, first=0):
    for number in range(first, first + steps):
        for params, optimizer in (mine, theirs):
            give_gradients(params, number)
            optimizer.step()


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    delays=st.lists(st.floats(0, 0.002), min_size=1, max_size=40),
    window_bytes=st.sampled_from([1_000, 4_000, 20_000, 2**20]),
    num_slots=st.integers(1, 4),
    half_duplex=st.booleans(),
)
def test_no_timing_of_the_copies_changes_a_bit(delays, window_bytes, num_slots, half_duplex):
    turn = iter(delays * 1000)
    lock = threading.Lock()

    def delay(lane, window):
        with lock:
            seconds = next(turn)
        time.sleep(seconds)

    link = ThreadLink(num_slots=num_slots, half_duplex=half_duplex, before_copy=delay)
    mine, theirs = pair(link, window_bytes=window_bytes, amsgrad=True)
    train(mine, theirs, steps=2)
    mine[1].synchronize()
    assert_same(mine[1], theirs[1], mine[0], theirs[0])


@pytest.mark.parametrize("window_bytes", [3_000, 12_000, 48_000])
def test_the_slots_together_stay_under_the_cap(window_bytes):
    link = ThreadLink()
    mine, theirs = pair(link, window_bytes=window_bytes)
    train(mine, theirs)
    windows = {span.window for span in mine[1].timeline()}
    assert len(windows) > 1
    assert link.buffer_bytes <= window_bytes


def test_a_parameter_that_can_not_be_cut_takes_what_it_needs():
    link = ThreadLink()
    params = [torch.nn.Parameter(torch.randn(64, 50))]
    swapped = (
        orlop.swap(torch.optim.Muon)(params, window_bytes=3_000) if hasattr(torch.optim, "Muon") else None
    )
    if swapped is None:
        pytest.skip("this torch has no Muon")
    swapped.links[HOST] = link
    params[0].grad = torch.randn(64, 50)
    swapped.step()
    assert link.buffer_bytes == 64 * 50 * 4


READS = {
    "state_dict": lambda o: o.state_dict()["state"],
    "deepcopy": lambda o: dict(enumerate(copy.deepcopy(o).state.values())),
    "synchronize": lambda o: (o.synchronize(), dict(enumerate(o.state.values())))[1],
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_whoever_reads_right_after_a_step_sees_state_at_rest(read):
    link = ThreadLink(down_bytes_per_second=300_000)
    mine, theirs = pair(link, window_bytes=12_000)
    train(mine, theirs, steps=1)
    found = read(mine[1])
    for entry, other in zip(found.values(), theirs[1].state.values()):
        assert all(torch.equal(entry[key], value) for key, value in other.items())


def test_step_returns_while_moments_are_still_on_their_way_home():
    link = ThreadLink(down_bytes_per_second=100_000)
    mine, theirs = pair(link, window_bytes=10**6)
    begin = time.perf_counter()
    train(mine, theirs, steps=1)
    returned = time.perf_counter() - begin
    mine[1].synchronize()
    assert returned < (time.perf_counter() - begin) / 2


def test_a_load_right_after_a_step_is_not_overtaken():
    link = ThreadLink(down_bytes_per_second=300_000)
    mine, theirs = pair(link, window_bytes=12_000)
    saved = copy.deepcopy(mine[1].state_dict())
    train(mine, theirs, steps=1)
    mine[1].load_state_dict(saved)
    time.sleep(0.05)
    assert all(not value.any() for entry in mine[1].state.values() for value in entry.values())


def test_prefetched_windows_are_used_and_void_after_a_load():
    link = ThreadLink()
    mine, theirs = pair(link, window_bytes=12_000)
    train(mine, theirs, steps=1)
    mine[1].prefetch()
    sent = link.bytes_up
    train(mine, theirs, steps=1, first=1)
    once = link.bytes_up - sent
    assert 0 < once < sent  # what was sent ahead was not sent again
    mine[1].prefetch()
    for _, optimizer in (mine, theirs):
        state = copy.deepcopy(optimizer.state_dict())
        for entry in state["state"].values():
            entry["exp_avg"].mul_(2)
        optimizer.load_state_dict(state)
    train(mine, theirs, steps=2, first=2)
    mine[1].synchronize()
    assert_same(mine[1], theirs[1], mine[0], theirs[0])


def test_a_wrong_guess_of_who_will_have_gradients_costs_only_the_copies():
    mine, theirs = pair(ThreadLink(), window_bytes=12_000)
    train(mine, theirs, steps=1)
    mine[1].prefetch()
    for params, optimizer in (mine, theirs):
        give_gradients(params, 1)
        params[1].grad = None
        optimizer.step()
    mine[1].synchronize()
    assert_same(mine[1], theirs[1], mine[0], theirs[0])


class FailsOnDemand(torch.optim.AdamW):
    fails = None

    def step(self, closure=None):
        if self.fails and any(p.numel() == self.fails for g in self.param_groups for p in g["params"]):
            raise RuntimeError("on demand")
        return super().step(closure)


def test_an_update_that_fails_leaves_every_window_old_or_new_and_says_which():
    mine, theirs = pair(ThreadLink(), window_bytes=12_000, optimizer_class=FailsOnDemand)
    params, swapped = mine
    train(mine, theirs, steps=1)
    swapped.synchronize()
    old = copy.deepcopy(swapped.state_dict()["state"])
    swapped.fails = 280
    give_gradients(params, 1)
    with pytest.raises(RuntimeError, match="on demand"):
        swapped.step()
    with pytest.raises(StateNotReady, match=r"window \d+ of \d+ failed; the \d+ before it are new"):
        swapped.step()
    give_gradients(theirs[0], 1)
    theirs[1].step()
    for index, (param, other) in enumerate(zip(params, theirs[0])):
        entry = swapped.state[param]
        is_old = all(torch.equal(entry[k], v) for k, v in old[index].items())
        is_new = all(torch.equal(entry[k], v) for k, v in theirs[1].state[other].items())
        assert is_old or is_new or param.numel() == 3000  # the one that was cut: by windows


@pytest.mark.parametrize("lane", ["up", "down"])
def test_a_copy_that_fails_is_a_fault_and_not_a_silence(lane):
    def fail(where, window):
        if (where, window) == (lane, 1):
            raise OSError("the cable came off")

    mine, _ = pair(ThreadLink(before_copy=fail), window_bytes=12_000)
    params, swapped = mine
    saved = copy.deepcopy(swapped.state_dict())
    give_gradients(params, 0)

    def step_and_wait():
        swapped.step()
        swapped.synchronize()

    with pytest.raises((OSError, StateNotReady), match="cable"):
        step_and_wait()
    with pytest.raises(StateNotReady):
        swapped.step()
    swapped.links[HOST] = ThreadLink()
    swapped.load_state_dict(saved)
    give_gradients(params, 0)
    swapped.step()


def run_backward(params, optimizer, passes=1):
    for number in range(passes):
        loss = sum((param * (number + 1) * param.sin()).sum() for param in params)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("link", [None, ThreadLink], ids=["in_place", "thread_link"])
@pytest.mark.parametrize("passes", [1, 3])
def test_stepping_in_backward_gives_the_same_bits_and_frees_gradients(link, passes):
    mine, theirs = pair(link() if link else None, window_bytes=12_000, step_in_backward=passes)
    if link is None:
        del mine[1].links[HOST]
    for params, optimizer in (mine, theirs):
        for _ in range(3):
            run_backward(params, optimizer, passes)
    for _ in range(passes):
        sum(param.sum() for param in mine[0]).backward()
    assert all(param.grad is None for param in mine[0])
    mine[1].step()
    for _ in range(passes):
        sum(param.sum() for param in theirs[0]).backward()
    theirs[1].step()
    mine[1].synchronize()
    assert_same(mine[1], theirs[1], mine[0], theirs[0])


def test_stepping_in_backward_with_unused_parameters_and_more_passes_than_said():
    mine, theirs = pair(ThreadLink(), window_bytes=12_000, step_in_backward=True)
    for params, optimizer in (mine, theirs):
        sum(param.square().sum() for param in params[:3]).backward()
        optimizer.step()
        optimizer.zero_grad()
    mine[1].synchronize()
    for param, other in zip(*(side[0] for side in (mine, theirs))):
        assert torch.equal(param, other)
    assert [mine[1].stepped(param) for param in mine[0]] == [True] * 3 + [False] * 3
    sum(param.square().sum() for param in mine[0]).backward()
    loss = sum(param.square().sum() for param in mine[0])
    with pytest.raises(RuntimeError, match="step is due"):
        loss.backward()


def test_a_grad_scaler_and_stepping_in_backward_are_refused_together():
    params = [torch.nn.Parameter(torch.ones(3))]
    optimizer = orlop.SwapAdamW(params, fused=True, step_in_backward=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    scaler.scale(params[0].sum()).backward()
    params[0].grad = torch.ones(3)
    with pytest.raises(OptimizerRefused, match="GradScaler"):
        scaler.step(optimizer)


def test_an_engine_that_clips_refuses_an_optimizer_that_steps_in_backward():
    """Never silently unclipped."""
    model = torch.nn.Linear(3, 3)
    with pytest.raises(OptimizerRefused, match="norm"):
        orlop.TrainEngine(model, orlop.SwapAdamW(model.parameters(), step_in_backward=True))


def test_the_timeline_and_its_trace(tmp_path, capsys):
    mine, theirs = pair(ThreadLink(), window_bytes=12_000)
    train(mine, theirs, steps=2)
    spans = mine[1].timeline()
    windows = {span.window for span in spans}
    assert len(windows) > 2
    for window in windows:
        (up,), (compute,), (down,) = (
            [s for s in spans if s.window == window and s.lane == lane] for lane in ("up", "compute", "down")
        )
        assert up.end_seconds <= compute.begin_seconds <= compute.end_seconds <= down.begin_seconds
    orlop.trace(tmp_path / "step.json", mine[1])
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["ph"] == "M"} == {"up", "compute", "down"}
    assert len([e for e in events if e["ph"] == "X"]) == len(spans)
    mine[1].step()
    orlop.trace(tmp_path / "last.json")
    assert len(json.loads((tmp_path / "last.json").read_text())["traceEvents"]) == len(events)
    description = mine[1].describe()
    assert capsys.readouterr().out == description + "\n"
    assert "of its measured limit" in description
    assert "arena" in description
    assert f"{len(windows)} windows" in description
