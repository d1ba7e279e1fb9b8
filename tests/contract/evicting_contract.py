"""What every tier that reports its evictions must do: subclass ``EvictingContract`` and give a ``tier`` fixture."""

from __future__ import annotations

import threading

import pytest
from tests.contract.store_contract import chain, key, value

from skymemory.kv.block import Place
from skymemory.store.base import Evicting, Presence, Store

SIZE = 1000


class EvictingContract:
    """``tier`` has a budget of four values of ``SIZE`` bytes."""

    @pytest.fixture
    def tier(self) -> Store:
        raise TypeError("a contract suite needs a tier fixture")

    @pytest.fixture
    def reported(self, tier: Store) -> list[tuple[bytes, bytes]]:
        assert isinstance(tier, Evicting) and tier.on_evict is None
        heard: list[tuple[bytes, bytes]] = []
        tier.on_evict = lambda evicted, data, place: heard.append((evicted, data))
        return heard

    def put(self, tier: Store, *numbers: int) -> None:
        assert tier.put_many([(key(n), value(n, SIZE)) for n in numbers]) == [True] * len(numbers)

    def test_evictions_are_reported_whole_in_order(self, tier: Store, reported: list[tuple[bytes, bytes]]) -> None:
        self.put(tier, 0, 1, 2, 3)
        assert reported == []
        self.put(tier, 10)
        self.put(tier, 20)
        assert reported == [(key(3), value(3, SIZE)), (key(2), value(2, SIZE))], "the end of the chain goes first"
        assert tier.stats()["evicted_total"] == 2

    def test_evictions_are_reported_with_the_place_that_the_writer_gave(self, tier: Store) -> None:
        assert isinstance(tier, Evicting)
        keys, places = chain(2)
        heard: list[tuple[bytes, Place | None]] = []
        tier.on_evict = lambda evicted, data, place: heard.append((evicted, place))
        assert tier.put_many([(k, value(1, SIZE)) for k in keys], places) == [True] * 2
        self.put(tier, 8)
        tier.put_many([(keys[1], value(2, SIZE))])  # again, without: what is known stays
        self.put(tier, 9, 10, 11)
        assert heard == [(key(8), None), (keys[1], places[1])]

    def test_what_is_deleted_replaced_or_closed_away_is_not_reported(
        self, tier: Store, reported: list[tuple[bytes, bytes]]
    ) -> None:
        self.put(tier, 0, 1)
        self.put(tier, 0)
        tier.delete([key(1)])
        tier.close()
        assert reported == []

    def test_what_could_not_make_room_is_not_reported(self, tier: Store, reported: list[tuple[bytes, bytes]]) -> None:
        self.put(tier, 0, 1, 2, 3)
        lease = tier.prepare_load([key(n) for n in range(4)])
        assert tier.put_many([(key(9), value(9, SIZE))]) == [False]
        tier.release(lease)
        assert reported == [] and tier.lookup([key(n) for n in range(4)]) == [Presence.HIT] * 4

    def test_evictions_are_reported_before_the_same_key_can_be_put_or_deleted(
        self, tier: Store, reported: list[tuple[bytes, bytes]]
    ) -> None:
        """Else a listener would hold what was replaced or deleted since for what is evicted."""
        assert isinstance(tier, Evicting)
        self.put(tier, 0, 1, 2, 3)
        order: list[str] = []
        telling = threading.Event()

        def hears(evicted: bytes, data: bytes, place: object) -> None:
            telling.set()
            deleting.join(0.2)  # it has to wait for the tier's lock
            order.append("reported")

        def delete() -> None:
            telling.wait(60)
            tier.delete([key(3)])
            order.append("deleted")

        tier.on_evict = hears
        deleting = threading.Thread(target=delete)
        deleting.start()
        self.put(tier, 10)
        deleting.join(60)
        assert order == ["reported", "deleted"]
