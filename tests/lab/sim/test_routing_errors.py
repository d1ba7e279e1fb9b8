"""What is wrong with a simulated router's estimates: by as much as is said, drawn for each server and request."""

from __future__ import annotations

import numpy as np
import pytest

from skymemory.conductor.picker import Fleet, Picker
from skymemory.conductor.prefix_index.approximate import ApproximatePrefixIndex
from skymemory.conductor.request import Request
from skymemory.errors import InvalidInput
from skymemory_lab.sim.routed_strategies import ErringLeastTtft
from skymemory_lab.sim.routing import as_routed
from skymemory_lab.sim.trace import TraceRequest

SERVERS = 4


class PerToken:
    def prefill_s(self, tokens: float, cached: float = 0) -> float:
        return (tokens - cached) / 1000


def a_picker(error: float, seed: int = 1) -> Picker:
    fleet = Fleet()
    for number in range(SERVERS):
        fleet.add(f"s{number}")
    return Picker(fleet, ErringLeastTtft(ApproximatePrefixIndex(1000), cost=PerToken(), error=error, seed=seed))


def asks(number: int, blocks: int = 2) -> Request:
    ids = tuple(1000 * number + at for at in range(blocks))
    return as_routed(TraceRequest(0.0, 512 * blocks, 5, ids))


def estimates(picker: Picker, count: int = 800) -> np.ndarray:
    servers = list(picker.fleet)
    return np.array([picker.scorer.rank(asks(number), servers, 1.0).estimated_ttft_s for number in range(count)])


@pytest.mark.brief()
def test_each_server_errs_for_itself_and_always_the_same() -> None:
    assert (estimates(a_picker(0.0), 5) == 1.024).all()
    off = estimates(a_picker(0.1)) / 1.024
    assert off.std() == pytest.approx(0.1, rel=0.05) and off.mean() == pytest.approx(1.0, abs=0.01)
    assert abs(np.corrcoef(off.T)[np.triu_indices(SERVERS, 1)]).max() < 0.1
    assert (estimates(a_picker(0.1)) / 1.024 == off).all() and (estimates(a_picker(0.1, 2)) / 1.024 != off).all()
    one = asks(1)
    early, late = (a_picker(0.1).scorer.rank(one, list(a_picker(0.1).fleet), at_s).scores for at_s in (1.0, 2.0))
    assert set(early).isdisjoint(late), "and drawn again when it is asked again later"


def test_waiting_is_off_too_and_what_is_believed_to_wait() -> None:
    waits, works = [], []
    for number in range(400):
        picker, first, behind = a_picker(0.1), asks(number, 20), asks(5000 + number)
        picker.routed(picker.pick(first, 0.0, {"s2"}), 0.0)
        scorer, servers = picker.scorer, list(picker.fleet)
        assert isinstance(scorer, ErringLeastTtft)
        work_s = 10.24 * scorer.factors(first, SERVERS, 0.0)[2]
        estimated = scorer.waits_s(behind, servers, 0.0)
        assert estimated[:2] == [0.0, 0.0] and estimated[2] == pytest.approx(
            work_s * scorer.factors(behind, SERVERS, 0.0)[2]
        )
        waits.append(estimated[2] / work_s)
        works.append(work_s / 10.24)
    assert np.std(waits) == pytest.approx(0.1, rel=0.15) and np.std(works) == pytest.approx(0.1, rel=0.15)
    assert abs(np.corrcoef(waits, works)[0, 1]) < 0.2


@pytest.mark.parametrize("error", [-0.1, 1.1])
def test_an_error_that_is_no_part_of_an_estimate_is_refused(error: float) -> None:
    with pytest.raises(InvalidInput, match="error is"):
        a_picker(error)
