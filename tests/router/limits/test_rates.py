"""The least rate of a body, and the connections that a limit of files leaves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skymemory.router.limits.files import LEAST_CONNECTIONS, MAX_CONNECTIONS, client_connections
from skymemory.router.limits.rates import GRACE_S, LeastRate


@given(st.lists(st.tuples(st.floats(0.01, 30.0), st.integers(0, 5_000)), min_size=1, max_size=60))
def test_a_body_ends_when_it_pauses_or_falls_behind_its_rate(pieces: list[tuple[float, int]]) -> None:
    """Whatever was sent before buys no more than the grace."""
    rate, now_s, total = 1000, 0.0, 0
    body = LeastRate(0.0)
    for wait_s, size in pieces:
        due_s = body.due_s
        now_s += wait_s
        if now_s > due_s:
            return
        total += size
        body.add(size, rate, now_s)
        assert body.due_s <= now_s + GRACE_S
        assert body.due_s <= GRACE_S + total / rate + 1e-9, "on average it keeps the rate"


def test_a_body_at_its_rate_goes_on() -> None:
    body, now_s = LeastRate(0.0), 0.0
    for _ in range(1_000):
        now_s += 5.0
        assert now_s <= body.due_s
        body.add(5_000, 1000, now_s)
    body.add(1 << 24, 1000, now_s)
    assert body.due_s == now_s + GRACE_S, "16 MiB at once do not buy four hours"


@pytest.mark.parametrize(
    ("files", "backends", "per_request", "expected"),
    [(None, 4, 1, MAX_CONNECTIONS), (1 << 20, 4, 1, MAX_CONNECTIONS), (256, 3, 1, 102), (256, 3, 2, 68), (32, 9, 1, 8)],
)
def test_each_client_leaves_its_request_connections_to_servers(
    files: int | None, backends: int, per_request: int, expected: int
) -> None:
    found = client_connections(files, backends, per_request)
    assert found == expected >= LEAST_CONNECTIONS
    if files is not None and found > LEAST_CONNECTIONS:
        assert found * (1 + per_request) + 4 * backends + 40 <= files
