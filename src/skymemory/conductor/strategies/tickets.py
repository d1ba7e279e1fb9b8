"""What a strategy noted when a request was sent, until it hears how that went."""

from __future__ import annotations

from typing import Generic, TypeVar

from skymemory.conductor.fleet import Server
from skymemory.conductor.request import Request

Note = TypeVar("Note")


class Tickets(Generic[Note]):
    """One note per request and server. The same request may be sent to a server twice; then the first note is first.

    Requests are told apart as objects (two equal ones may be under way), and kept alive here, so that no other gets
    the number of one that is gone.
    """

    def __init__(self) -> None:
        self._open: dict[tuple[int, int], list[tuple[Request, Note]]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._open.values()))

    def note(self, request: Request, server: Server, note: Note) -> None:
        self._open.setdefault((id(request), server.slot), []).append((request, note))

    def take(self, request: Request, server: Server) -> Note | None:
        """The note; None where there is none, as after ``forget``."""
        key = (id(request), server.slot)
        notes = self._open.get(key)
        if notes is None:
            return None
        _, note = notes.pop(0)
        if not notes:
            del self._open[key]
        return note

    def forget(self, server: Server) -> None:
        for key in [key for key in self._open if key[1] == server.slot]:
            del self._open[key]
