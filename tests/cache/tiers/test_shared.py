"""A hierarchy over a tier that it shares with others: what it may delete there, what it owes, whose bytes it sends."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.cache.tiers.faulty_tier import FaultyTier, sealed, whole
from tests.cache.tiers.small_tiers import LOCAL, QUICK, items, near_and_far, over, soon, sources
from tests.contract.store_contract import key
from tests.store.conftest import cut_off, simulated, store_over
from tests.store.real_redis import RedisServer
from tests.store.test_sealed import sealed as wrapped

from skymemory.cache.tiers.store import HierarchySettings, TieredStore
from skymemory.cache.tiers.tier import TierSettings
from skymemory.errors import ConstellationError
from skymemory.kv.block import Place
from skymemory.store.base import Buffer, Places, Presence, StoreTicket
from skymemory.store.memory import MemoryStore
from skymemory.store.redis import NAMESPACE, RedisStore
from skymemory.store.wrappers import Selecting

EIGHT = tuple(range(1, 9))


def places(*numbers: int) -> list[Place]:
    return [Place(at, key(numbers[at - 1]) if at else None) for at in range(len(numbers))]


def well(tiers: TieredStore) -> bool:
    return all(tier.breaker.closed and not tier.dirty_keys for tier in tiers.tiers)


class Gated(FaultyTier):
    """``complete_store`` waits for ``gate`` before it reads a byte, as where another thread has the client's lock."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.gate, self.begun = threading.Event(), threading.Event()
        self.gate.set()
        self.fails = False

    def complete_store(self, ticket: StoreTicket) -> list[bool]:
        self.begun.set()
        assert self.gate.wait(20.0)
        if self.fails:
            raise ConstellationError("dark")
        return super().complete_store(ticket)


class Reading(Gated):
    """Reads what it is to store in ``complete_store`` only, as Redis, the disk and the constellation do."""

    def prepare_store(self, items: Sequence[tuple[bytes, Buffer]], places: Places = ()) -> StoreTicket:
        ticket = super().prepare_store([], ())
        ticket.state = (ticket.state, items, places)
        return ticket

    def complete_store(self, ticket: StoreTicket) -> list[bool]:
        _, given, where = ticket.state  # type: ignore[misc]
        self.begun.set()
        assert self.gate.wait(20.0)
        return super(FaultyTier, self).complete_store(MemoryStore.prepare_store(self, given, where))


def given_up(far: FaultyTier) -> TieredStore:
    """A hierarchy that gives puts into ``far`` up after 50 ms, and takes none for hanging."""
    settings = TierSettings(ask_deadline_s=5.0, store_deadline_s=0.05, breaker=QUICK)
    return TieredStore([(MemoryStore(name="near"), LOCAL), (far, settings)])


@pytest.mark.parametrize("write_back", [False, True], ids=["through", "back"])
def test_what_a_tier_missed_of_blocks_that_others_stored_there_stays(write_back: bool) -> None:
    near, middle, far = MemoryStore(name="near"), FaultyTier("middle"), FaultyTier("far")
    tiers = over(near, middle, far, write_back=write_back, promote="never")
    stored = items(*EIGHT)
    assert far.put_many(stored) == [True] * 8, "by another process"
    far.trouble = "raise"
    assert tiers.prefix([at for at, _ in stored]) == 0
    assert tiers.put_many(stored, places(*EIGHT)) == [True] * 8 and tiers.flush(5.0)
    assert not tiers.tiers[2].dirty_keys
    far.trouble = ""
    assert soon(lambda: well(tiers))
    assert tiers.stats().get("tier_doubts_settled_total{far}", 0) == 0
    assert far.lookup([at for at, _ in stored]) == [Presence.HIT] * 8
    near.delete([key(1)])
    middle.delete([key(1)])
    assert sources(tiers, 1) == ["far"], "its copy is the same value: it is believed"
    tiers.close()


def test_a_block_whose_put_was_given_up_is_neither_doubted_nor_deleted() -> None:
    far = Gated("far")
    tiers = given_up(far)
    far.put_many(items(1))
    far.gate.clear()
    assert tiers.put_many(items(1, 2), places(1, 2)) == [True, True]
    assert key(1) not in tiers.tiers[1].dirty_keys
    far.gate.set()
    assert soon(lambda: well(tiers) and far.lookup([key(1), key(2)]) == [Presence.HIT] * 2)
    assert sources(tiers, 1) == ["near"]
    assert tiers.stats().get("tier_doubts_settled_total{far}", 0) == 0
    tiers.close()


def test_a_named_value_that_lands_late_and_sound_is_believed_from_then_on() -> None:
    far = Gated("far")
    tiers = given_up(far)
    far.gate.clear()
    assert tiers.put_many(items(1)) == [True] and key(1) in tiers.tiers[1].dirty_keys
    far.gate.set()
    assert soon(lambda: not tiers.tiers[1].dirty_keys)
    assert far.lookup([key(1)]) == [Presence.HIT]
    assert tiers.stats().get("tier_doubts_settled_total{far}", 0) == 0
    tiers.close()


@pytest.mark.parametrize("change", ["put", "delete", "failure"])
def test_what_lands_late_stays_in_doubt_where_its_key_was_changed_meanwhile(change: str) -> None:
    far = Gated("far")
    tiers = given_up(far)
    far.put_many([(key(1), sealed(key(1), b"old"))])
    far.gate.clear()
    assert tiers.put_many([(key(1), sealed(key(1), b"late"))]) == [True]
    new = sealed(key(1), b"new")
    if change == "put":
        assert tiers.put_many([(key(1), new)]) == [True]
    elif change == "delete":
        assert tiers.delete([key(1)]) == [None]
    else:
        far.fails = True
    far.gate.set()
    assert soon(lambda: well(tiers) and far.get_many([key(1)]) == [None])
    assert tiers.stats()["tier_doubts_settled_total{far}"] == 1
    tiers.close()


def test_a_deleted_block_does_not_come_back_with_its_late_put() -> None:
    far = Gated("far")
    tiers = given_up(far)
    far.gate.clear()
    assert tiers.put_many(items(1), places(1)) == [True] and far.begun.wait(20.0)
    assert soon(lambda: tiers.tiers[1].usable(())), "it hangs, and answers probes"
    assert tiers.delete([key(1)]) == [None], "the put may still land"
    threading.Event().wait(0.2)
    assert key(1) in tiers.tiers[1].dirty_keys
    far.gate.set()
    assert soon(lambda: well(tiers) and far.lookup([key(1)]) == [Presence.MISS])
    assert tiers.get_many([key(1)]) == [None]
    tiers.close()


@pytest.mark.parametrize("how", ["named value", "block", "view"])
def test_a_put_that_was_given_up_does_not_read_what_its_caller_writes_next(how: str) -> None:
    far = Reading("far")
    tiers = given_up(far)
    far.gate.clear()
    room = bytearray(b"right" * 1000)
    value = memoryview(room)[:] if how == "view" else room
    assert tiers.put_many([(key(1), value)], places(1) if how == "block" else ()) == [True]
    assert far.begun.wait(20.0)
    room[:] = b"WRONG" * 1000
    far.gate.set()
    assert soon(lambda: far.lookup([key(1)]) == [Presence.HIT])
    assert far.get_many([key(1)]) == [b"right" * 1000]
    tiers.close()


def test_what_a_tier_missed_of_blocks_is_stored_there_when_it_is_back() -> None:
    tiers, near, far = near_and_far()
    far.trouble = "raise"
    assert tiers.put_many(items(*EIGHT), places(*EIGHT)) == [True] * 8
    assert tiers.delete([key(8)]) == [None]
    near.delete([key(7)])
    far.trouble = ""
    keys = [key(number) for number in EIGHT]
    wanted = [Presence.HIT] * 6 + [Presence.MISS] * 2
    assert soon(lambda: well(tiers) and far.lookup(keys) == wanted and not tiers.stats()["far_keys_owed"])
    assert far.get_many(keys[:6]) == [value for _, value in items(*EIGHT[:6])]
    tiers.close()


@pytest.mark.parametrize("write_back", [False, True], ids=["through", "back"])
@pytest.mark.parametrize("trouble", ["raise", "slow"])
def test_what_a_tier_missed_comes_from_whichever_still_has_it(trouble: str, write_back: bool) -> None:
    """Nothing else would bring it there: an engine does not store again what a tier has."""
    near, middle, far = MemoryStore(5000, name="near"), MemoryStore(name="middle"), FaultyTier("far", slow_s=0.5)
    tiers = over(near, middle, far, write_back=write_back)
    far.trouble = trouble
    prompts = [tuple(range(first, first + 4)) for first in range(10, 90, 4)]
    for prompt in prompts:
        assert tiers.put_many(items(*prompt), places(*prompt)) == [True] * 4
    keys = [key(number) for prompt in prompts for number in prompt]
    assert soon(lambda: middle.lookup(keys) == [Presence.HIT] * 80)
    far.trouble = ""
    assert soon(lambda: far.lookup(keys) == [Presence.HIT] * 80 and not tiers.stats()["far_keys_owed"])
    assert far.get_many(keys) == [value for prompt in prompts for _, value in items(*prompt)]
    tiers.close()


def test_what_is_owed_waits_for_a_tier_that_may_have_it_and_holds_up_nothing_else() -> None:
    near, middle, far = MemoryStore(name="near"), FaultyTier("middle"), FaultyTier("far")
    tiers = over(near, middle, far)
    far.trouble = "raise"
    keys = [key(number) for number in EIGHT]
    assert tiers.put_many(items(*EIGHT), places(*EIGHT)) == [True] * 8
    assert soon(lambda: middle.lookup(keys) == [Presence.HIT] * 8)
    with tiers._locks.exclusive(keys):  # the mover holds no copy that it read before
        near.delete(keys[4:])  # as if it had been evicted
        far.trouble, middle.trouble = "", "raise"
    assert soon(lambda: far.lookup(keys) == [Presence.HIT] * 4 + [Presence.MISS] * 4)
    assert soon(lambda: tiers.stats()["far_keys_owed"] == 4)
    middle.trouble = ""
    assert soon(lambda: far.lookup(keys) == [Presence.HIT] * 8 and not tiers.stats()["far_keys_owed"])
    tiers.close()


def test_what_a_server_did_not_answer_is_stored_when_it_is_back(tmp_path: Path) -> None:
    """The puts failed, and were no failures of the tier's threads: it said that it had no answer."""
    server = RedisServer(tmp_path)
    try:
        redis = RedisStore(server.url)
        tiers = TieredStore([(MemoryStore(name="near"), LOCAL), (redis, TierSettings(breaker=QUICK))])
        server.stop()
        assert tiers.put_many(items(*EIGHT), places(*EIGHT)) == [True] * 8
        assert tiers.stats()["redis_keys_owed"] == 8
        server.start()
        keys = [key(number) for number in EIGHT]
        another = RedisStore(server.url)
        assert soon(lambda: another.lookup(keys) == [Presence.HIT] * 8)
        assert another.get_many(keys) == [value for _, value in items(*EIGHT)]
        tiers.close()
    finally:
        server.stop()


def test_a_named_value_is_written_back_when_the_server_that_did_not_answer_is_back(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    try:
        redis = RedisStore(server.url)
        tiers = TieredStore(
            [(MemoryStore(name="near"), LOCAL), (redis, TierSettings(breaker=QUICK))],
            HierarchySettings(write_back=True),
        )
        server.stop()
        assert tiers.put_many(items(1)) == [True] and not tiers.flush(0.5)
        assert tiers.stats().get("write_back_refused_total", 0) == 0
        server.start()
        another = RedisStore(server.url)
        assert soon(lambda: another.get_many([key(1)]) == [items(1)[0][1]])
        tiers.close()
    finally:
        server.stop()


def test_a_tier_that_is_away_is_not_asked_for_what_it_is_owed() -> None:
    tiers, _near, far = near_and_far()
    far.trouble = "raise"
    assert tiers.put_many(items(*EIGHT), places(*EIGHT)) == [True] * 8
    assert soon(lambda: not tiers.tiers[1].breaker.closed)
    probes = tiers.stats().get("tier_probes_total{far}", 0)
    calls = far.calls
    threading.Event().wait(0.5)
    asked = far.calls - calls
    assert asked <= 4 * (tiers.stats()["tier_probes_total{far}"] - probes), "probes alone"
    assert tiers.stats()["far_keys_owed"] == 8
    tiers.close()


def test_what_a_tier_refused_by_its_own_word_is_not_offered_again() -> None:
    near, far = MemoryStore(name="near"), FaultyTier("far", budget_bytes=3000)
    tiers = over(near, far)
    tiers._mover.stop(5.0)  # so that it stays, were it backlog
    far.put_many(items(11, 12, 13))
    ticket = far.prepare_load([key(11), key(12), key(13)])  # so that there is no room
    assert tiers.put_many(items(1, 2), places(1, 2)) == [True, True]
    assert tiers.stats()["far_keys_owed"] == 0
    far.release(ticket)
    tiers.close()


def test_a_later_releases_value_in_redis_is_not_deleted_through_a_hierarchy(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    try:
        import redis

        raw = redis.Redis.from_url(server.url)
        name, theirs = NAMESPACE + key(1), b"of a later release" + b"SKV2" + b"abcd"
        raw.set(name, theirs)
        tiers = TieredStore([(MemoryStore(name="near"), LOCAL), (RedisStore(server.url), TierSettings(breaker=QUICK))])
        assert tiers.get_many([key(1)]) == [None]
        assert tiers.put_many([(key(1), b"mine"), (key(2), b"other")]) == [True, True]
        assert soon(lambda: not tiers.tiers[1].dirty_keys)
        assert raw.get(name) == theirs and tiers.get_many([key(1)]) == [b"mine"]
        assert tiers.delete([key(1)]) == [True] and raw.get(name) is None, "what any client deletes is deleted"
        tiers.close()
    finally:
        server.stop()


@pytest.mark.brief(every=3)
@pytest.mark.parametrize("write_back", [False, True], ids=["through", "back"])
@pytest.mark.parametrize("seed", range(3))
def test_no_trouble_loses_a_block_that_others_stored_and_all_is_stored_in_the_end(seed: int, write_back: bool) -> None:
    """Random failures and hangs of two shared tiers while prompts are stored and loaded over them."""
    dice = random.Random(seed)
    middle, far = FaultyTier("middle", seed=seed, slow_s=0.03), FaultyTier("far", seed=seed + 1, slow_s=0.03)
    hasty = TierSettings(ask_deadline_s=0.01, load_deadline_s=0.01, store_deadline_s=0.01, verify=whole, breaker=QUICK)
    tiers = TieredStore(
        [(MemoryStore(name="near"), LOCAL), (middle, hasty), (far, hasty)], HierarchySettings(write_back=write_back)
    )
    prompts = [tuple(range(at, at + 6)) for at in range(1, 61, 6)]
    for prompt in prompts[:5]:
        assert far.put_many(items(*prompt), places(*prompt)) == [True] * 6, "by another process"
    saved: set[int] = set()
    for _ in range(60):
        for store in (middle, far):
            store.trouble, store.rate = dice.choice(["", "", "raise", "slow"]), dice.choice([0.3, 1.0])
        prompt = dice.choice(prompts)
        if dice.random() < 0.5:
            assert tiers.put_many(items(*prompt), places(*prompt)) == [True] * 6
            saved.update(prompt)
        else:
            for number, value in zip(prompt, tiers.get_many([key(number) for number in prompt]), strict=True):
                assert value is None or value == items(number)[0][1]
    middle.trouble = far.trouble = ""
    wanted = [key(number) for number in sorted(saved.union(*prompts[:5]))]
    assert soon(lambda: well(tiers) and far.lookup(wanted) == [Presence.HIT] * len(wanted))
    assert far.get_many(wanted) == [items(number)[0][1] for number in sorted(saved.union(*prompts[:5]))]
    assert not any("doubts_settled" in name for name in tiers.stats())
    tiers.close()


def test_a_constellation_says_which_puts_had_no_answer_through_whatever_is_around_it() -> None:
    sky = simulated()
    store = wrapped(Selecting(store_over(sky, 1)))
    with cut_off(sky):
        ticket = store.prepare_store(items(1, 2))
        assert store.complete_store(ticket) == [False, False] and ticket.unanswered == {key(1), key(2)}
    ticket = store.prepare_store(items(1, 2))
    assert store.complete_store(ticket) == [True, True] and ticket.unanswered == frozenset()
