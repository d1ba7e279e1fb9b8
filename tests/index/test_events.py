"""Events can be compared, told apart and kept in sets."""

from __future__ import annotations

from skymemory.index.events import Cleared, Event, Removed, Stored


def test_events_are_values() -> None:
    hashes = (b"a" * 32,)
    events: list[Event] = [
        Stored(1, "memory", hashes),
        Stored(2, "memory", hashes),
        Stored(1, "constellation", hashes, 4, b"p" * 32, b"context"),
        Removed(1, "memory", hashes),
        Cleared(1, "memory"),
    ]
    assert len(set(events)) == 5
    assert Stored(1, "memory", hashes) == events[0]
