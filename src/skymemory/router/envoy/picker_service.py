"""The service behind all ext_proc streams of an endpoint picker: reads prompts, picks servers, limits and counts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from skymemory.conductor.picker import NoServer, Picker
from skymemory.conductor.request import Decision, Request
from skymemory.conductor.scheduler import Placement, Refusal, Scheduler
from skymemory.conductor.strategies.base import requests_at
from skymemory.metrics import Counters
from skymemory.router.admission import Overloaded
from skymemory.router.api_error import ApiError
from skymemory.router.backends import Backends
from skymemory.router.prompts.reader import PROMPT_PATHS, PromptReader, without_prompt
from skymemory.router.queue import QueueSettings, RequestQueue
from skymemory.router.request_account import DeferredWork
from skymemory.router.settings import PickerSettings
from skymemory.router.waiting_room import WaitingRoom

COUNTED_BY_SERVER = ("picks_total", "fallbacks_total", "ejections_total")
RETRY_AFTER_S = 1
"""Sent with refusals that have no better estimate."""
NO_PROMPT = without_prompt()
"""A request routed by load alone: a list of models, an embedding, anything without a known prompt."""


@dataclass(slots=True)
class PickerService:
    scheduler: Scheduler
    reader: PromptReader
    backends: Backends
    settings: PickerSettings = field(default_factory=PickerSettings)
    most_body_bytes: int = 16 << 20
    counters: Counters = field(default_factory=Counters)
    thread_bytes: int | None = None
    """Longer bodies are read in a thread, since a tokenizer takes its time; None: none are."""
    streams: int = 0
    """Exchanges in flight."""
    deferred: DeferredWork = field(init=False)
    queue: RequestQueue = field(default_factory=lambda: RequestQueue(QueueSettings()))
    room: WaitingRoom | None = None
    """Where requests wait until a server has room, while the picker runs; None: they are refused."""

    def __post_init__(self) -> None:
        self.backends.on_ejected, self.backends.on_removed = self._ejected, self._removed
        self.deferred = DeferredWork(lambda: self.counters.add("faults_total"))

    @property
    def picker(self) -> Picker:
        return self.scheduler.prefill

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run in this event loop from now on."""
        self.deferred.schedule = loop.call_soon
        self.room = WaitingRoom(self.queue, self.has_room, loop, self.deferred.flush)

    def close(self) -> None:
        self.deferred.flush()
        self.deferred.schedule = None
        if self.room is not None:
            self.room.close()

    def _ejected(self, server: str) -> None:
        self.counters.add("ejections_total", label=server)

    def _removed(self, server: str) -> None:
        for name in COUNTED_BY_SERVER:
            self.counters.forget(name, server)

    def read(self, headers: Mapping[str, str], body: bytes) -> Request:
        """
        Raises:
            ApiError: its path has prompts, and no engine could read it.
        """
        # A gateway may strip a path's prefix after it has asked, so the end of the path decides.
        path = headers.get(":path", "").partition("?")[0]
        known = next((known for known in PROMPT_PATHS if path.endswith(known)), None)
        if known is None or headers.get(":method") != "POST":
            return NO_PROMPT
        return self.reader.read(known, headers, body)

    def outcome(self, headers: Mapping[str, str], body: bytes) -> Request | ApiError:
        """``read``, for another thread: an error is a value."""
        try:
            return self.read(headers, body)
        except ApiError as error:
            return error

    def must_wait(self, request: Request, among: frozenset[str] | None, now_s: float) -> WaitingRoom | None:
        """Where the request has to wait, if others do or no server has room."""
        self.deferred.flush()
        room = self.room
        if room is None or not self.queue.settings.most_requests or not self.settings.max_requests:
            return None
        self.backends.review(now_s)
        return None if room.is_open_to(request, among) else room

    def look(self) -> None:
        """A server may have room again: let waiting requests go, after the deferred work that frees it."""
        if self.room is not None and len(self.queue):
            self.deferred.run(self.room.look)

    def choose(self, request: Request, among: Collection[str] | None, now_s: float) -> Placement:
        """
        Raises:
            ApiError: no server may have it (503), or all are full or the admission rule refuses it (429).
        """
        self.backends.review(now_s)
        # Three filters: servers of the model, Envoy's subset, and room. The strategy ranks what remains.
        serving = self.backends.serving(request)
        if serving is not None:
            among = serving if among is None else [name for name in among if name in serving]
        among = self._with_room(among, now_s)
        try:
            placed = self.scheduler.place(request, now_s, among)
        except NoServer as error:
            raise ApiError(503, str(error), retry_after_s=RETRY_AFTER_S) from error
        if isinstance(placed, Refusal):
            raise Overloaded(placed)
        return placed

    def endpoints(self, decision: Decision) -> str:
        """``ip:port`` of the chosen server, then of as many fallbacks as are wanted, best first; all of the subset that
        the request allows.
        """
        most = self.settings.fallbacks  # the decision sorts its fallbacks only when they are read
        return ",".join((decision.server, *decision.fallbacks[:most])) if most else decision.server

    def has_room(self, request: Request, among: frozenset[str] | None) -> bool:
        """Whether a server that could serve it is not full; also true where none is up, which is an error at once."""
        serving, now_s = self.backends.serving(request), time.monotonic()
        if serving is not None:
            among = serving if among is None else among & serving
        try:
            self._with_room(among, now_s)
        except ApiError:
            return False
        return True

    def _with_room(self, among: Collection[str] | None, now_s: float) -> Collection[str] | None:
        most = self.settings.max_requests
        if not most:
            return among
        able = [
            server for server in self.picker.fleet if server.takes_requests and (among is None or server.name in among)
        ]
        roomy = [server.name for server in able if requests_at(server, now_s) < most]
        if able and not roomy:
            message = f"all {len(able)} servers have {most} requests or more; try again"
            raise ApiError(429, message, retry_after_s=RETRY_AFTER_S)
        return roomy if len(roomy) < len(able) else among
