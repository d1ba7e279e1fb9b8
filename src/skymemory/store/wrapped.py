"""A store behind another: everything is passed on, so that a rule about writes need say no more than itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skymemory.errors import InvalidInput
from skymemory.store.base import (
    Buffer,
    LoadTicket,
    Places,
    Presence,
    Store,
    StoreTicket,
    TwoPhase,
    bring_near,
    check_items,
    check_places,
    keeps,
)


class Wrapped(TwoPhase):
    """``store`` with nothing changed."""

    def __init__(self, store: Store) -> None:
        self.store = store

    @property
    def name(self) -> str:
        return self.store.name

    def lookup(self, keys: Sequence[bytes]) -> list[Presence]:
        return self.store.lookup(keys)

    def prefix(self, keys: Sequence[bytes]) -> int:
        return self.store.prefix(keys)

    def prepare_load(self, keys: Sequence[bytes]) -> LoadTicket:
        return self.store.prepare_load(keys)

    def complete_load(self, ticket: LoadTicket) -> list[memoryview | None]:
        return self.store.complete_load(ticket)

    def release(self, ticket: LoadTicket) -> None:
        self.store.release(ticket)

    def prepare_store(self, items: Sequence[tuple[bytes, Buffer]], places: Places = ()) -> StoreTicket:
        return self.store.prepare_store(items, places)

    def complete_store(self, ticket: StoreTicket) -> list[bool]:
        return self.store.complete_store(ticket)

    def touch(self, keys: Sequence[bytes]) -> None:
        self.store.touch(keys)

    def pin(self, keys: Sequence[bytes], ttl_s: float) -> list[bool]:
        return self.store.pin(keys, ttl_s)

    def delete(self, keys: Sequence[bytes]) -> list[bool | None]:
        return self.store.delete(keys)

    def prefetch(self, keys: Sequence[bytes], at: float) -> list[bool]:
        return bring_near(self.store, keys, at)

    def keeps(self, keys: Sequence[bytes]) -> list[bool]:
        return keeps(self.store, keys)

    def stats(self) -> dict[str, int | float]:
        return self.store.stats()

    def estimate_load_s(self, keys: Sequence[bytes], now_s: float) -> float:
        return self.store.estimate_load_s(keys, now_s)

    def close(self) -> None:
        self.store.close()


@dataclass(frozen=True, slots=True)
class _Chosen:
    """What a ticket of ours stands for: the store's own, and per item whether it is in that. Kept by the ticket alone,
    so that it is freed with a ticket that is never completed.
    """

    inner: StoreTicket
    chosen: list[bool]


class Selecting(Wrapped):
    """Stores some of what it is offered: ``select`` says which. The rest comes back as not stored."""

    def select(self, items: Sequence[tuple[bytes, Buffer]]) -> list[bool]:
        """Whether each of these goes to the store behind."""
        return [True] * len(items)

    def stored(self, items: Sequence[tuple[bytes, Buffer]]) -> None:
        """These were stored."""

    def prepare_store(self, items: Sequence[tuple[bytes, Buffer]], places: Places = ()) -> StoreTicket:
        items, places = check_items(items), check_places(items, places)
        chosen = self.select(items)
        inner = self.store.prepare_store(
            [item for item, go in zip(items, chosen, strict=True) if go],
            [place for place, go in zip(places, chosen, strict=True) if go],
        )
        return StoreTicket(items, inner.expires_s, state=_Chosen(inner, chosen), places=places)

    def complete_store(self, ticket: StoreTicket) -> list[bool]:
        state = ticket.state
        if not isinstance(state, _Chosen):
            raise InvalidInput("this store ticket is not open: each is completed once, by its own store")
        inner, ticket.state = state.inner, None
        outcomes = iter(self.store.complete_store(inner))
        done = [go and next(outcomes) for go in state.chosen]
        ticket.seconds, ticket.state, ticket.unanswered = inner.seconds, inner.state, inner.unanswered
        self.stored([item for item, ok in zip(ticket.items, done, strict=True) if ok])
        return done
