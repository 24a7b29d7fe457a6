"""Retention and names, for any steps."""

from hypothesis import given
from hypothesis import strategies as st

from orlop.store import catalog

STEPS = st.integers(0, 10**12)
HOSTS = st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?", fullmatch=True)


@given(
    older=st.sets(STEPS, max_size=20),
    published=STEPS,
    keep_last=st.integers(1, 5),
    keep_every=st.none() | st.integers(1, 1000),
)
def test_what_must_stay_stays_and_nothing_else_does(
    older: set[int], published: int, keep_last: int, keep_every: int | None
) -> None:
    steps = {*older, published}
    gone = catalog.expired(steps, published=published, keep_last=keep_last, keep_every=keep_every)
    stay = steps - set(gone)
    assert set(gone) <= steps
    assert gone == sorted(gone)
    assert {published, *sorted(steps)[-keep_last:]} <= stay
    for step in stay - {published, *sorted(steps)[-keep_last:]}:
        assert keep_every is not None
        assert step % keep_every == 0
    # Once done, there is nothing more to do.
    assert catalog.expired(stay, published=published, keep_last=keep_last, keep_every=keep_every) == []


@given(step=STEPS)
def test_a_step_name_reads_back(step: int) -> None:
    assert catalog.parse_step(catalog.step_name(step)) == step


@given(step=STEPS, host=HOSTS, pid=st.integers(1, 2**22), kind=st.sampled_from(["partial", "retired"]))
def test_an_unpublished_name_reads_back_and_is_no_checkpoint(
    step: int, host: str, pid: int, kind: str
) -> None:
    final = catalog.step_name(step)
    name = catalog.unpublished_name(final, kind=kind, host=host, pid=pid, token="0123abcd")  # type: ignore[arg-type]
    found = catalog.parse_unpublished(name)
    assert found is not None
    assert (found.final, found.kind, found.host, found.pid) == (final, kind, host, pid)
    assert catalog.parse_step(name) is None
