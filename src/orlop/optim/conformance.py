"""What every link must do, as checks that run on any link: `orlop.testing.check_link`.

Owns: the contract of `orlop.optim.link.Link`, executable. Must not know: which link it is given.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from orlop.optim.link import Link

_SHAPES = ((64, 33), (), (1000,), (3, 5))
_DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float64)


def check_link(make: Callable[[], Link]) -> None:
    """Check a link against the contract.

    Args:
        make: Makes a new link; called once for each check.

    Raises:
        AssertionError: Says which rule is broken.
    """
    for check in (
        _check_values_arrive,
        _check_slots_are_reused,
        _check_release_takes_nothing_home,
        _check_spans,
    ):
        check(make())


def _hosts(seed: float) -> list[Tensor]:
    return [
        (torch.arange(torch.Size(shape).numel(), dtype=torch.float64) + seed).to(dtype).reshape(shape)
        for shape, dtype in zip(_SHAPES, _DTYPES)
    ]


def _require(holds: bool, rule: str, link: Link) -> None:
    if not holds:
        raise AssertionError(f"{type(link).__name__}: {rule}")


def _check_values_arrive(link: Link) -> None:
    hosts = _hosts(1.0)
    expected = [host.clone() for host in hosts]
    link.begin()
    cargo = link.bring_up(0, 0, hosts)
    _require(len(cargo.lent) == len(hosts), "bring_up lends one tensor per host", link)
    with link.computing(cargo):
        for lent, host, value in zip(cargo.lent, hosts, expected):
            _require(
                lent.shape == host.shape and lent.stride() == host.stride() and lent.dtype == host.dtype,
                "a lent tensor has its host's shape, strides and dtype",
                link,
            )
            _require(torch.equal(lent.to("cpu"), value), "values have arrived when computing begins", link)
            lent.add_(1)
            if link.copies:
                _require(torch.equal(host, value), "the host is untouched until it is taken home", link)
    pairs = [(lent, host) for lent, host in zip(cargo.lent, hosts) if lent is not host]
    link.take_home(cargo, pairs)
    link.finish()
    for host, value in zip(hosts, expected):
        _require(torch.equal(host, value + 1), "everything is home after finish", link)


def _check_slots_are_reused(link: Link) -> None:
    windows = [_hosts(float(number)) for number in range(3 * link.num_slots + 1)]
    expected = [[host * 2 for host in hosts] for hosts in windows]
    link.begin()
    for number, hosts in enumerate(windows):
        cargo = link.bring_up(number, number % link.num_slots, hosts)
        with link.computing(cargo):
            for lent in cargo.lent:
                lent.mul_(2)
        link.take_home(cargo, [(lent, host) for lent, host in zip(cargo.lent, hosts) if lent is not host])
    link.finish()
    for hosts, values in zip(windows, expected):
        _require(all(map(torch.equal, hosts, values)), "a slot is filled only after its window is home", link)


def _check_release_takes_nothing_home(link: Link) -> None:
    if not link.copies:
        return
    hosts = _hosts(5.0)
    expected = [host.clone() for host in hosts]
    link.begin()
    for number in range(link.num_slots + 1):
        cargo = link.bring_up(number, 0, hosts)
        link.release(cargo)
    link.finish()
    _require(all(map(torch.equal, hosts, expected)), "release leaves the hosts as they are", link)


def _check_spans(link: Link) -> None:
    link.begin()
    hosts = _hosts(2.0)
    cargo = link.bring_up(7, 0, hosts)
    with link.computing(cargo):
        pass
    link.take_home(cargo, [(lent, host) for lent, host in zip(cargo.lent, hosts) if lent is not host])
    spans = {span.lane: span for span in link.spans()}
    _require("compute" in spans and spans["compute"].window == 7, "computes have spans", link)
    if link.copies:
        nbytes = sum(host.nbytes for host in hosts)
        _require(
            spans["up"].nbytes == spans["down"].nbytes == nbytes, "copies have spans with their bytes", link
        )
        _require(
            spans["up"].end_seconds <= spans["compute"].begin_seconds + 1e-4
            and spans["compute"].end_seconds <= spans["down"].begin_seconds + 1e-4,
            "up, compute and down of a window follow one another",
            link,
        )
