from __future__ import annotations

import time

import pytest
import torch

from orlop.optim.accelerator import link_for
from orlop.optim.link import NoLink, SerialLink
from orlop.testing import ThreadLink, check_link

LINKS = {
    "none": NoLink,
    "serial": lambda: SerialLink(torch.device("cpu")),
    "threads": ThreadLink,
    "threads, one slot": lambda: ThreadLink(num_slots=1),
    "threads, one lane": lambda: ThreadLink(half_duplex=True),
    "threads, throttled": lambda: ThreadLink(up_bytes_per_second=1e7, down_bytes_per_second=1e7),
}


@pytest.mark.parametrize("make", LINKS.values(), ids=LINKS)
def test_every_link_keeps_the_contract(make):
    check_link(make)


class Early(ThreadLink):
    """Computes before the values are there."""

    def computing(self, cargo):
        return NoLink().computing(cargo)


class Overtaking(ThreadLink):
    """Fills a slot while its last window is still going home."""

    def bring_up(self, window, slot, hosts):
        self._slots[slot].free = None
        return super().bring_up(window, slot, hosts)


@pytest.mark.parametrize(
    "link, rule",
    # On a busy machine values that are not there yet show first in the slot that was filled too early.
    [
        (Early, "values have arrived|a slot is filled only after its window is home"),
        (Overtaking, "a slot is filled only after its window is home"),
    ],
)
def test_the_contract_is_able_to_fail(link, rule):
    with pytest.raises(AssertionError, match=rule):
        check_link(
            lambda: link(before_copy=lambda lane, window: time.sleep(0.05 if lane == "down" else 0.005))
        )


def test_released_buffers_are_poisoned():
    link = ThreadLink()
    link.begin()
    cargo = link.bring_up(0, 0, [torch.ones(100), torch.ones(3, dtype=torch.bfloat16)])
    with link.computing(cargo):
        assert bool((cargo.lent[0] == 1).all())
    link.take_home(cargo, [])
    link.finish()
    assert all(bool(lent.isnan().all()) for lent in cargo.lent)


def test_the_host_needs_no_link():
    assert isinstance(link_for(torch.device("cpu")), NoLink)
