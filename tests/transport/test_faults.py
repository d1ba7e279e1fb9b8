"""Injected faults: none without a share, all with share 1, the same for a seed, about as many as asked."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skymemory.errors import InvalidInput
from skymemory.transport.faults import FaultInjector

DATA = bytes(range(200))


@given(st.binary(max_size=100))
def test_without_shares_nothing_happens(data: bytes) -> None:
    faults = FaultInjector(seed=3)
    assert faults.apply(data) == [(data, 0.0)]
    assert not faults.active and faults.injected == 0 and faults.datagrams == 1


shares = st.floats(0, 1)


@given(shares, shares, shares, shares, st.integers(0, 2**32), st.lists(st.binary(max_size=60), max_size=30))
def test_a_seed_decides_and_the_counts_are_what_happened(
    loss: float, duplicate: float, reorder: float, corrupt: float, seed: int, datagrams: list[bytes]
) -> None:
    faults, same = (FaultInjector(loss, duplicate, reorder, corrupt, seed, 0.01) for _ in range(2))
    flights = [faults.apply(data) for data in datagrams]
    assert flights == [same.apply(data) for data in datagrams]
    assert faults.lost == sum(not flight for flight in flights)
    assert faults.duplicated == sum(len(flight) == 2 for flight in flights)
    copies = [(data, *copy) for data, flight in zip(datagrams, flights, strict=True) for copy in flight]
    assert faults.corrupted == sum(data != arrived for data, arrived, _ in copies)
    assert faults.reordered == sum(extra_s > 0 for _, _, extra_s in copies)
    assert all(0 <= extra_s <= 0.01 for _, _, extra_s in copies)
    assert all(len(arrived) <= len(data) for data, arrived, _ in copies)
    assert faults.injected == faults.lost + faults.duplicated + faults.reordered + faults.corrupted


def test_certain_faults_always_happen() -> None:
    assert FaultInjector(loss=1.0).apply(DATA) == []
    assert len(FaultInjector(duplicate=1.0).apply(DATA)) == 2
    assert FaultInjector(reorder=1.0).apply(DATA)[0][1] > 0
    corrupting = FaultInjector(corrupt=1.0)
    arrived = [corrupting.apply(DATA)[0][0] for _ in range(400)]
    assert DATA not in arrived
    assert 50 < sum(len(data) < len(DATA) for data in arrived) < 150, "about one in four is cut short"
    assert corrupting.apply(b"") == [(b"", 0.0)], "nothing to damage"


@pytest.mark.parametrize("share", [0.01, 0.05, 0.3])
def test_shares_are_met(share: float) -> None:
    faults = FaultInjector(loss=share, duplicate=share, seed=9)
    count = 20_000
    for _ in range(count):
        faults.apply(b"x")
    tolerance = 5 * (count * share) ** 0.5
    assert abs(faults.lost - count * share) < tolerance
    assert abs(faults.duplicated - count * (1 - share) * share) < tolerance


@pytest.mark.parametrize(
    "wrong", [{"loss": -0.1}, {"duplicate": 1.1}, {"reorder": float("nan")}, {"corrupt": 2}, {"reorder_delay_s": -1}]
)
def test_shares_that_are_none_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidInput):
        FaultInjector(**wrong)  # type: ignore[arg-type]
