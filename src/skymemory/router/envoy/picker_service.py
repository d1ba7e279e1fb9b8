"""What all exchanges of an endpoint picker share: who picks, who reads prompts, what is allowed, what is counted."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from skymemory.conductor.admission import base
from skymemory.conductor.picker import NoServer, Picker
from skymemory.conductor.request import Decision, Prompt, Request
from skymemory.conductor.scheduler import Placement, Scheduler
from skymemory.conductor.strategies.base import requests_at
from skymemory.metrics import Counters
from skymemory.router.backends import Backends
from skymemory.router.bad_request import BadRequest
from skymemory.router.deferred import Afterwards
from skymemory.router.queue import QueueSettings, RequestQueue
from skymemory.router.waiting_room import WaitingRoom

PROMPT_PATHS = ("/v1/completions", "/v1/chat/completions")
"""The ends of paths that have prompts: what a gateway strips from their beginning it strips after us."""
COUNTED_BY_SERVER = ("picks_total", "fallbacks_total", "ejections_total")
_NOTHING = Prompt(np.empty(0, np.uint64), np.empty(0, np.uint64), block_tokens=16.0, tokens=0)
NO_PROMPT = Request(_NOTHING)
"""What is sent to a server by load alone: a list of models, an embedding, whatever has no prompt that we know of."""


class ReadsPrompts(Protocol):
    """``router.prompts.reader.PromptReader``, or a test's."""

    def read(self, path: str, headers: Mapping[str, str], body: bytes) -> Request:
        """
        Raises:
            BadRequest: no engine could take it.
        """
        ...


class Refusal(Exception):
    """The client is answered at once, and no server sees its request."""

    def __init__(self, status: int, message: str, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.retry_after_s = retry_after_s


def overloaded(refusal: base.Refusal) -> Refusal:
    """A refusal of the rule of admission, or of the queue."""
    retry_after_s = max(1, math.ceil(min(refusal.retry_after_s, 3600.0)))
    return Refusal(429, f"overloaded: {refusal.reason}; try again later", retry_after_s)


@dataclass(frozen=True, slots=True)
class DeskSettings:
    fallbacks: int = 0
    """Endpoints named after the first. More than none needs a data plane that reads lists (Envoy: override_host)."""
    most_body_bytes: int = 16 << 20
    most_streams: int = 10_000
    """Requests under way in this picker; the next is turned away."""
    most_requests: int | None = None
    """Requests at one server, by its own report or our account; where all have as many the next is turned away."""
    retry_after_s: int = 1
    tell_decisions: bool = False
    """Whether a client that asks (``x-skymemory-decision``) is told; it names servers' addresses."""


@dataclass(slots=True)
class Desk:
    scheduler: Scheduler
    reader: ReadsPrompts
    backends: Backends
    settings: DeskSettings = field(default_factory=DeskSettings)
    counters: Counters = field(default_factory=Counters)
    reads_elsewhere_bytes: int | None = None
    """Bodies of as many bytes are read in a thread beside, since a tokenizer takes its time; None: all at once."""
    streams: int = 0
    """Exchanges under way."""
    after: Afterwards = field(init=False)

    queue: RequestQueue = field(default_factory=lambda: RequestQueue(QueueSettings()))
    room: WaitingRoom | None = None
    """Where requests wait until a server has room, while the picker runs; None: they are refused."""

    def __post_init__(self) -> None:
        self.backends.ejected, self.backends.left = self._ejected, self._left
        self.after = Afterwards(lambda: self.counters.add("faults_total"))

    @property
    def picker(self) -> Picker:
        return self.scheduler.prefill

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """It runs in that loop from now on."""
        self.after.when = loop.call_soon
        self.room = WaitingRoom(self.queue, self.has_room, loop, self.after.settle)

    def close(self) -> None:
        self.after.settle()
        self.after.when = None
        if self.room is not None:
            self.room.close()

    def _ejected(self, server: str) -> None:
        self.counters.add("ejections_total", label=server)

    def _left(self, server: str) -> None:
        """What was counted of it goes."""
        for name in COUNTED_BY_SERVER:
            self.counters.forget(name, server)

    def read(self, headers: Mapping[str, str], body: bytes) -> Request:
        """
        Raises:
            Refusal: it goes to a path with prompts, and no engine could read it.
        """
        path = headers.get(":path", "").partition("?")[0]
        known = next((known for known in PROMPT_PATHS if path.endswith(known)), None)
        if known is None or headers.get(":method") != "POST":
            return NO_PROMPT
        try:
            return self.reader.read(known, headers, body)
        except BadRequest as error:
            raise Refusal(error.status, error.message) from error

    def outcome(self, headers: Mapping[str, str], body: bytes) -> Request | Refusal:
        """``read``, for another thread: a refusal is a value."""
        try:
            return self.read(headers, body)
        except Refusal as refusal:
            return refusal

    def must_wait(self, request: Request, among: frozenset[str] | None, now_s: float) -> WaitingRoom | None:
        """Where it has to wait, if others do or no server has room."""
        self.after.settle()
        room = self.room
        if room is None or not self.queue.settings.most_requests or self.settings.most_requests is None:
            return None
        self.backends.review(now_s)
        return None if room.is_open_to(request, among) else room

    def look(self) -> None:
        """A server may have room again: after what was put off, since that says so."""
        if self.room is not None and len(self.queue):
            self.after.do(self.room.look)

    def choose(self, request: Request, among: Collection[str] | None, now_s: float) -> Placement:
        """
        Raises:
            Refusal: no server may have it (503), all have enough or the rule of admission refuses it (429).
        """
        self.backends.review(now_s)
        serving = self.backends.serving(request)
        if serving is not None:
            among = serving if among is None else [name for name in among if name in serving]
        among = self._with_room(among, now_s)
        try:
            placed = self.scheduler.place(request, now_s, among)
        except NoServer as error:
            raise Refusal(503, str(error), self.settings.retry_after_s) from error
        if isinstance(placed, base.Refusal):
            raise overloaded(placed)
        return placed

    def endpoints(self, decision: Decision) -> str:
        """``ip:port`` of the server chosen, then of as many fallbacks as are wanted, best first.

        All of them are of the subset that was asked for, since the picker saw no others.
        """
        most = self.settings.fallbacks  # They are sorted only for who is told of them.
        return ",".join((decision.server, *decision.fallbacks[:most])) if most else decision.server

    def has_room(self, request: Request, among: frozenset[str] | None) -> bool:
        """Whether one that could serve it is not full, or none is there at all: then it is told so at once."""
        serving, now_s = self.backends.serving(request), time.monotonic()
        if serving is not None:
            among = serving if among is None else among & serving
        try:
            self._with_room(among, now_s)
        except Refusal:
            return False
        return True

    def _with_room(self, among: Collection[str] | None, now_s: float) -> Collection[str] | None:
        most = self.settings.most_requests
        if most is None:
            return among
        able = [
            server for server in self.picker.fleet if server.takes_requests and (among is None or server.name in among)
        ]
        roomy = [server.name for server in able if requests_at(server, now_s) < most]
        if able and not roomy:
            message = f"all {len(able)} servers have {most} requests or more; try again"
            raise Refusal(429, message, self.settings.retry_after_s)
        return roomy if len(roomy) < len(able) else among
