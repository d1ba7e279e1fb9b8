"""The servers behind a router: who there is, who serves what, who is ejected and returns, who comes and leaves.

One behaviour for both doors. It decides and does no I/O: requests say how they went, and where servers are checked
(`route`) checks do, too; where they are not (behind Envoy, which is told who is ready) an ejected server is tried again
after a while.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from skymemory.conductor.fleet import Server
from skymemory.conductor.picker import Picker
from skymemory.conductor.request import Request
from skymemory.router.settings import Backend, Health

log = logging.getLogger("skymemory.router")

REST_S = 10.0
"""How long a server that nobody checks is left alone before it is tried again."""


@dataclass(slots=True, eq=False)
class KnownServer:
    """What is known of one server beside what the fleet knows."""

    backend: Backend
    server: Server
    failures: int = 0
    """In a row, of checks and requests that it did not take."""
    successes: int = 0
    """Of checks, in a row, since it was ejected."""
    why: str = ""
    """What the last failure was."""
    gone: bool = False
    """Its address refused a connection since it was ejected: the process is not there, nor what it had cached."""
    leaving: bool = False
    """No longer among those that are wanted; removed when its last request has ended."""
    back_at_s: float | None = None
    """When it is tried again, where nobody checks it."""
    models: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """What it lists at /v1/models, by id."""

    @property
    def base_model(self) -> str:
        """The one model it serves, adapters aside; empty: not known, or several."""
        listed = [each for each, entry in self.models.items() if not entry.get("parent")]
        named = list(self.backend.models) or listed
        return named[0] if len(named) == 1 else ""

    @property
    def names(self) -> set[str]:
        """Models and adapters it is said to serve."""
        return {*self.backend.models, *self.models} | set(self.backend.adapters)


class Backends:
    """``known`` servers by name. A fleet's servers are these and no others."""

    def __init__(
        self,
        picker: Picker,
        health: Health | None = None,
        *,
        are_checked: bool = True,
    ) -> None:
        """``are_checked``: whether somebody asks the servers how they are (``checked``, ``failed``)."""
        self.known: dict[str, KnownServer] = {}
        self.health = health or Health()
        self.adapters: dict[str, str] = {}
        """LoRA adapters, and the models they are for (empty: not known); prompts are read by it."""
        self._picker = picker
        self._are_checked = are_checked
        self.ejected: Callable[[str], None] = lambda name: None
        """Told of each server that is."""
        self.left: Callable[[str], None] = lambda name: None
        """Told of each server that was removed."""
        self._serving: dict[str, frozenset[str]] = {}
        self._resting: set[KnownServer] = set()

    # Who there is

    def set(self, backends: Sequence[Backend]) -> tuple[list[str], list[str]]:
        """These, and no others: who came, and who leaves when it has finished what it has. Who stays keeps what is
        known of it; at another address it is another server.
        """
        wanted = {backend.name: backend for backend in backends}
        leave = [name for name, known in self.known.items() if name not in wanted and not known.leaving]
        for name in leave:
            self.known[name].leaving = self.known[name].server.draining = True
        came = []
        for name, backend in wanted.items():
            known = self.known.get(name)
            if known is None:
                known = self.known[name] = KnownServer(backend, self._picker.fleet.add(name))
                came.append(name)
            elif known.backend.url != backend.url:
                self._picker.scorer.forget(known.server)
                known = self.known[name] = KnownServer(backend, known.server)
                known.server.healthy, known.server.reported = True, None
            known.backend, known.leaving, known.server.draining = backend, False, backend.drain
        self.let_go()
        self._learn_names()
        return came, leave

    def let_go(self) -> bool:
        """Remove who was leaving and has nothing left to do. Whether there was somebody."""
        gone = [name for name, known in self.known.items() if known.leaving and not known.server.in_flight]
        for name in gone:
            del self.known[name]
            self._picker.remove(name)
            self.left(name)
            log.info("server %s left", name)
        if gone:
            self._learn_names()
        return bool(gone)

    # Who may serve a request

    def able(self, request: Request, tried: Collection[str], max_waiting: int) -> Collection[str] | None:
        """Who may serve ``request``: not who was ``tried`` or has ``max_waiting`` (0: any). None: whoever there is."""
        serving = self.serving(request)
        if not tried and not max_waiting:
            return None if serving is None or len(serving) == len(self.known) else serving
        names = self.known if serving is None else serving
        return {name for name in names if name not in tried and not self._is_full(name, max_waiting)}

    def full(self, request: Request, max_waiting: int) -> bool:
        """Whether those who could serve it are there, and have as many waiting as they may."""
        serving = self.serving(request)
        names = [name for name in serving or self.known if self.known[name].server.takes_requests]
        return bool(names) and all(self._is_full(name, max_waiting) for name in names)

    def serving(self, request: Request) -> frozenset[str] | None:
        """Who lists its adapter, if one of them is up (others may still load it), else who serves its model; and who
        says nothing of models. None where that is not known: anybody may be asked, and says that it does not exist.
        """
        if request.adapter:
            listing = self._serving.get(request.adapter)
            if listing is not None and any(self.known[name].server.takes_requests for name in listing):
                return listing
        return self._serving.get(request.model)

    def _is_full(self, name: str, max_waiting: int) -> bool:
        return bool(max_waiting) and self.known[name].server.prefilling >= max_waiting

    # Ejection and return

    def failed(self, name: str, why: str, now_s: float, gone: bool = False) -> bool:
        """A check failed, or a request found nobody, or lost whoever it found. Whether it is ejected now.

        Where nobody checks, the last server is not: a doubtful one is better than none.
        """
        known = self.known.get(name)
        if known is None:
            return False
        known.failures, known.successes, known.why = known.failures + 1, 0, why
        known.gone = known.gone or gone
        if not known.server.healthy or known.failures < self.health.failures:
            return False
        if not self._are_checked:
            if not any(other.takes_requests for other in self._picker.fleet if other is not known.server):
                return False
            known.back_at_s = now_s + REST_S
            self._resting.add(known)
        known.server.healthy = False
        self.ejected(name)
        log.warning("server %s is ejected after %d failures in a row: %s", name, known.failures, why)
        return True

    def answered(self, name: str) -> None:
        """A request got its first byte from it. That does not bring an ejected server back."""
        known = self.known.get(name)
        if known is not None and known.server.healthy:
            known.failures = 0

    def checked(self, name: str) -> None:
        """A check went well."""
        known = self.known.get(name)
        if known is None:
            return
        known.failures = 0
        if known.server.healthy:
            return
        known.successes += 1
        if known.successes >= self.health.successes:
            self._return(known)

    def review(self, now_s: float) -> None:
        """Where nobody checks: try those again whose rest is over. One more failure ejects them."""
        if not self._resting:
            return
        for known in [known for known in self._resting if (known.back_at_s or 0.0) <= now_s]:
            self._resting.discard(known)
            if self.known.get(known.backend.name) is known:
                known.failures = self.health.failures - 1
                self._return(known)

    def _return(self, known: KnownServer) -> None:
        if known.gone:
            self._picker.scorer.forget(known.server)
        known.server.healthy, known.gone, known.successes, known.why, known.back_at_s = True, False, 0, "", None
        log.warning("server %s is back", known.backend.name)

    # Who serves what

    def lists(self, name: str, models: Mapping[str, Mapping[str, Any]]) -> None:
        """What a server answered at /v1/models."""
        known = self.known.get(name)
        if known is not None and known.models != models:
            known.models = dict(models)
            self._learn_names()

    def reported(self, name: str) -> None:
        """Its load report is new, and may name adapters that are."""
        known = self.known.get(name)
        report = None if known is None else known.server.reported
        if report is not None and not report.adapters <= self.adapters.keys():
            self._learn_names()

    def _learn_names(self) -> None:
        """Who serves which model, and which names are adapters: those that name a parent, or that settings or
        metrics name. A report that is old still tells names: an adapter does not become a model because its engine is
        silent.
        """
        staying = {name: known for name, known in self.known.items() if not known.leaving}
        unknown = frozenset(name for name, known in staying.items() if not known.backend.models and not known.models)
        every = set().union(*(known.names for known in staying.values())) if staying else set()
        self._serving = {
            each: unknown | {name for name, known in staying.items() if each in known.names} for each in every if each
        }
        adapters: dict[str, str] = {}
        for known in self.known.values():
            bases = {each for each, entry in known.models.items() if not entry.get("parent")} | {*known.backend.models}
            only = known.base_model
            report = known.server.reported
            named = {*known.backend.adapters, *(report.adapters if report is not None else ())}
            adapters.update({each: only for each in named if each not in bases})
            adapters.update({each: str(entry["parent"]) for each, entry in known.models.items() if entry.get("parent")})
        self.adapters.clear()
        self.adapters.update(adapters)
