"""Store events: what routers hear of the store is what an engine has stored, loaded, or found to be gone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.engine.vllm.engine import BLOCK, SIZE, Engine, Request, name_of

from skymemory.engine.vllm.announcements import Announced, Announcements
from skymemory.engine.vllm.plan import WorkerOutcome
from skymemory.store.base import Presence
from skymemory.store.memory import MemoryStore

VALUE = BLOCK * SIZE
TOKENS = list(range(5 * VALUE + 3))
NAMES = [name_of(TOKENS[: (block + 1) * BLOCK]) for block in range(5 * SIZE)]


class Router:
    """Follows the events."""

    def __init__(self, announcements: Announcements) -> None:
        self.announcements = announcements
        self.has: set[bytes] = set()

    def now(self) -> set[bytes]:
        for stored, names in self.announcements.take():
            assert names and (stored or self.has.issuperset(names))
            self.has = self.has | {*names} if stored else self.has - {*names}
        return self.has


def following(store: Any) -> tuple[Engine, Router]:
    announcements = Announcements(1)
    return Engine(store, announcements=announcements), Router(announcements)


def computed(engine: Engine, name: str = "first") -> None:
    request = Request(name, TOKENS)
    engine.matched(request)
    engine.admit(request)
    engine.step((request, len(TOKENS)))
    while engine.scheduler.saving:
        engine.step()
    engine.step()
    engine.release(request)


def loaded(engine: Engine) -> int:
    request = Request("again", TOKENS)
    tokens, _ = engine.matched(request)
    engine.admit(request, tokens)
    if tokens:
        engine.until_loaded(request)
    engine.step((request, len(TOKENS) - tokens))
    engine.release(request)
    return tokens


class Refusing(MemoryStore):
    """Takes every second value."""

    asked = 0

    def put_many(self, items: Any, places: Any = ()) -> Any:
        taken = []
        for item, place in zip(items, places, strict=True):
            self.asked += 1
            taken += super().put_many([item], [place]) if self.asked % 2 else [False]
        return taken


def test_what_was_stored_is_announced_once_it_is() -> None:
    engine, router = following(MemoryStore())
    request = Request("first", TOKENS)
    engine.matched(request)
    engine.admit(request)
    assert router.now() == set()
    engine.step((request, len(TOKENS)))
    while engine.scheduler.saving:
        engine.step()
    engine.step()
    assert router.now() == {*NAMES}
    engine.close()


def test_what_the_store_did_not_take_is_not() -> None:
    store = Refusing()
    engine, router = following(store)
    computed(engine)
    held = {name for number, name in enumerate(NAMES) if number // SIZE % 2 == 0}
    assert store.asked == 5 and router.now() == held
    engine.close()


def test_who_loads_announces_and_who_finds_nothing_takes_back() -> None:
    store = MemoryStore()
    first, _ = following(store)
    computed(first)
    first.close()
    engine, router = following(store)
    assert loaded(engine) == 5 * VALUE and router.now() == {*NAMES}
    assert loaded(engine) == 5 * VALUE and router.now() == {*NAMES}
    asks = Request("asks", TOKENS)
    engine.matched(asks)
    store.delete([engine.scheduler._known["asks"].keys[2]])
    engine.scheduler.finished(asks)
    engine.matched(asks)
    assert router.now() == {*NAMES[: 2 * SIZE]}
    engine.scheduler.finished(asks)
    computed(engine)
    assert router.now() == {*NAMES}
    engine.close()


def test_after_a_reset_all_begins_again() -> None:
    engine, router = following(MemoryStore())
    computed(engine)
    assert router.now() == {*NAMES}
    engine.scheduler.reset()
    assert router.now() == set(), "also where vLLM, which has blocks in use, says nothing"
    engine.scheduler.update(WorkerOutcome(saved=[b"of before"]))
    computed(engine, "after")
    assert router.now() == {*NAMES}
    engine.close()


def test_when_vllm_says_that_all_is_gone_what_is_loaded_next_is_said_again() -> None:
    """It means its own cache."""
    engine, router = following(MemoryStore())
    computed(engine)
    assert router.now() == {*NAMES}
    router.has.clear()
    assert loaded(engine) == 5 * VALUE and router.now() == {*NAMES}
    engine.close()


def test_what_only_named_requests_can_load_is_not_announced() -> None:
    """A prompt taken over from an engine whose cache was reset."""
    store = MemoryStore()
    first, _ = following(store)
    first.scheduler.reset()
    prompt = Request("p", TOKENS, kv_transfer_params={"do_remote_decode": True})
    first.matched(prompt)
    first.admit(prompt)
    first.step((prompt, len(TOKENS)))
    while first.scheduler.saving:
        first.step()
    first.step()
    params = first.scheduler.finished(prompt)
    first.close()
    engine, router = following(store)
    request = Request("d", TOKENS, kv_transfer_params=params)
    tokens, _ = engine.matched(request)
    assert tokens == 5 * VALUE
    engine.admit(request, tokens)
    engine.until_loaded(request)
    engine.step((request, len(TOKENS) - tokens))
    assert router.now() == set()
    engine.close()


class Elsewhere(MemoryStore):
    """All that it lacks another engine is storing, which never ends well."""

    def lookup(self, keys: Sequence[bytes]) -> list[Presence]:
        return [Presence.PENDING if one is Presence.MISS else one for one in super().lookup(keys)]


def test_what_another_engine_is_storing_is_not_announced() -> None:
    engine, router = following(Elsewhere())
    computed(engine)
    assert router.now() == set()
    engine.close()


@pytest.mark.parametrize("seed", range(20))
def test_any_course_of_saves_losses_and_ranks(seed: int) -> None:
    """Against sets: a value is there when all ranks said so after its last order, until it is lost or crowded out."""
    dice = random.Random(seed)
    ranks, kept = dice.choice([1, 2, 3]), dice.choice([2, 4, 100])
    announcements = Announcements(ranks, kept)
    router = Router(announcements)
    ordered: dict[bytes, int] = {}
    there: dict[bytes, None] = {}
    for _ in range(400):
        key = b"%d" % dice.randrange(8)
        what = dice.choice(
            ["saving", "saved", "saved", "saved", "unsaved", "lost", "stored", "clear"][: dice.choice([7, 8])]
        )
        if what == "saving":
            announcements.saving(key, [b"a" + key, b"b" + key])
            ordered.pop(key, None)
            ordered[key] = 0
            if len(ordered) > kept:
                del ordered[next(iter(ordered))]
        elif what == "saved":
            announcements.saved([key])
            if key in ordered:
                ordered[key] += 1
        elif what == "unsaved":
            announcements.unsaved([key])
            ordered.pop(key, None)
        elif what == "lost":
            announcements.lost([key])
            there.pop(key, None)
        elif what == "stored":
            announcements.stored(key, [b"a" + key, b"b" + key])
        elif dice.random() < 0.1:
            announcements.clear()
            ordered.clear()
            there.clear()
        if what == "stored" or ordered.get(key, 0) >= ranks:
            if what != "stored":
                del ordered[key]
            there.pop(key, None)
            there[key] = None
            if len(there) > kept:
                del there[next(iter(there))]
        assert router.now() == {letter + name for name in there for letter in (b"a", b"b")}


def test_events_of_one_kind_come_as_one() -> None:
    announcements = Announcements(1)
    for key in (b"1", b"2"):
        announcements.stored(key, [key])
    announcements.lost([b"1", b"absent"])
    announcements.stored(b"3", [b"3"])
    assert announcements.take() == [
        Announced(True, [b"1", b"2"]),
        Announced(False, [b"1"]),
        Announced(True, [b"3"]),
    ]
    assert announcements.take() == []
