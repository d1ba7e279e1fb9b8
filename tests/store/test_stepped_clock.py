"""Every tier's contract while the wall clock of its process is set at each look."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest
from tests.cache.tiers import test_contract as tiers
from tests.contract.store_contract import Tier
from tests.store import test_disk_contract, test_redis, test_sealed
from tests.store.conftest import connection, udp_store
from tests.store.redis_server import test_daemon
from tests.store.sky import test_contract

from skymemory.protocol.wire import Op

shared_server, running = test_redis.shared_server, test_daemon.running
STEPS_S = (0.0, 40.0, -40.0, 86_400.0, -86_400.0)


class Stepped:
    """Before a class of the contract."""

    @pytest.fixture(autouse=True)
    def steps(self, tier: Tier, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """From when the tier is open: it must not go by the wall clock, or not for long."""
        wall_s, dice = time.time, random.Random(1)
        monkeypatch.setattr(time, "time", lambda: wall_s() + dice.choice(STEPS_S))
        yield


class TestDisk(Stepped, test_disk_contract.TestDisk):
    pass


class TestSealedMemory(Stepped, test_sealed.TestSealedMemory):
    pass


@pytest.mark.slow
class TestSealedConstellation(Stepped, test_sealed.TestSealedConstellation):
    pass


@pytest.mark.slow
class TestUdp(Stepped, test_contract.TestUdpWithIndexFile):
    pass


@pytest.mark.slow
class TestTiers(Stepped, tiers.TestThreeStores):
    pass


@pytest.mark.slow
class TestRedis(Stepped, test_redis.TestRedis):
    pass


@pytest.mark.slow
class TestOurClientThroughTheDaemon(Stepped, test_daemon.TestOurClientThroughIt):
    pass


def test_a_question_under_way_outlives_a_wall_clock_that_is_set() -> None:
    with udp_store() as store:
        client = connection(store)
        with client.lock:
            number = client.machine.ask(Op.PING, b"", store._sky.torus.satellites()[0], client.now_s())
        tomorrow_s = time.time() + 86_400
        client._clock._wall = lambda: tomorrow_s
        assert client.run([number])[number].ok
        assert client.machine.breaker.closed
        assert abs(client.now_s() - tomorrow_s) < 60, "then it is followed"
