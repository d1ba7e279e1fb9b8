"""Exchange between routers in memory: their messages, at once or lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from skymemory.conductor.picker import Picker, Scorer
from skymemory.conductor.prefix_index.replicated import SharedPrefixIndex
from skymemory.conductor.sharing.replica_state import Cursor, ReplicaState
from skymemory.conductor.strategies.registry import named


def sharing_strategy(name: str, servers: Sequence[str], blocks_per_server: int = 31_250) -> Scorer:
    """Return a strategy whose index is shared, for servers whose slots are their positions."""
    slots = {server: slot for slot, server in enumerate(servers)}
    names = dict(enumerate(servers))
    return named(name, index=SharedPrefixIndex(names.get, slots.get, blocks_per_server))


class ReplicaExchange:
    """Exchange of all messages at each call, except those for which ``is_lost`` (sender, receiver) returns True."""

    def __init__(self, is_lost: Callable[[int, int], bool] = lambda sender, receiver: False) -> None:
        self._is_lost = is_lost
        self.states: list[ReplicaState] = []
        self._cursors: dict[tuple[int, int], Cursor] = {}

    def connect(self, pickers: Sequence[Picker]) -> None:
        for number, picker in enumerate(pickers):
            index = getattr(picker.scorer, "index", None)
            shared = index if isinstance(index, SharedPrefixIndex) else None
            state = ReplicaState(number.to_bytes(16, "big"), shared)
            state.connect([picker])
            self.states.append(state)
        numbers = range(len(pickers))
        self._cursors = {(one, other): Cursor() for one in numbers for other in numbers if one != other}

    def exchange(self, now_s: float) -> None:
        for (sender, receiver), cursor in self._cursors.items():
            for message in self.states[sender].next_messages(cursor, now_s):
                if self._is_lost(sender, receiver):
                    continue
                _, answer = self.states[receiver].receive(message, now_s)
                if answer is not None and not self._is_lost(receiver, sender):
                    self.states[sender].receive(answer, now_s)
                    cursor.change = None
        for state in self.states:
            state.review(now_s)
