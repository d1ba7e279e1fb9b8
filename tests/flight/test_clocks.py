"""Clocks of hosts in C that jump: a computer that sleeps, a host that stands still."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.flight.test_daemon import check, daemon, ledger_balances, put, up, values
from tests.soak.overload import sleeping
from tests.soak.slept_host import fall_asleep

from skymemory.constellation.torus import SatelliteId
from skymemory.store.sky.store import ConstellationStore
from skymemory.testbed import control
from skymemory.testbed.connect import open_constellation
from skymemory.testbed.flight import Choice
from skymemory.testbed.plan import ConstellationPlan
from skymemory.testbed.run_directory import RunDirectory

__all__ = ["daemon", "up"]

SLEPT_S = 45.0
STOOD_STILL_S = 30.0
HEALED_S = 60.0


@pytest.mark.brief("python")
@pytest.mark.parametrize("satellite", ["python", "mixed"])
def test_a_computer_that_slept(
    up: Callable[..., RunDirectory], tmp_path: Path, satellite: Choice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The box moved on meanwhile, for hosts of either kind and for their clients: what was stored is found."""
    if "sanitized" in os.environ.get("SKYMEMORY_FLIGHT", ""):
        pytest.skip("its clocks are exchanged by LD_PRELOAD, before which ASan insists to be loaded")
    kept = values(4, 100_000)
    with sleeping(tmp_path) as slept:
        directory = up(satellite, time_scale=60.0, epoch_s=time.time())
        plan = directory.read_plan()
        with open_constellation(directory.path) as store:
            put(store, kept)
            check(store, kept)
            fall_asleep(slept, SLEPT_S)
            await_all(store, kept)
        answers = await_answers(plan)
    # By the clock of this process, which slept as well.
    assert max(found["clock_off_us"] for found in answers.values() if found) < 5e6


@pytest.mark.slow
@pytest.mark.parametrize("satellite", ["c", "mixed"])
def test_a_host_that_stood_still(up: Callable[..., RunDirectory], satellite: Choice) -> None:
    """The box moves on, past silent satellites; no read gives a wrong byte, and afterwards all values are back."""
    directory = up(satellite, hosts=5, time_scale=60.0, epoch_s=time.time())
    plan = directory.read_plan()
    kept = values(12, 200_000)
    with open_constellation(directory.path) as store:
        put(store, kept)
        host = directory.living()["host-1"]
        host.send_signal(signal.SIGSTOP)
        end_s = time.monotonic() + STOOD_STILL_S
        while time.monotonic() < end_s:
            for key, found in zip(kept, store.get_many(list(kept)), strict=True):
                assert found is None or bytes(found) == kept[key]
            time.sleep(0.5)
        host.send_signal(signal.SIGCONT)
        await_all(store, kept)
        answers = await_answers(plan)
    assert all(ledger_balances(found) for found in answers.values() if found)


def await_all(store: ConstellationStore, kept: dict[bytes, bytes]) -> None:
    found_by_s = time.monotonic() + HEALED_S
    while missing := [key for key, found in zip(kept, store.get_many(list(kept)), strict=True) if found is None]:
        assert time.monotonic() < found_by_s, f"{len(missing)} values are lost"
        time.sleep(0.5)
    check(store, kept)


def await_answers(plan: ConstellationPlan) -> dict[SatelliteId, dict[str, int] | None]:
    """Of all satellites: a host that has fallen behind may answer late at first."""
    end_s = time.monotonic() + HEALED_S
    while not all((answers := control.ping_all(plan)).values()):
        assert time.monotonic() < end_s, f"no answer from {[one for one, found in answers.items() if not found]}"
    return answers
