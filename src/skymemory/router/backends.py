"""The servers behind a proxy: their addresses and models, who is ejected and who returns, who comes and who leaves.

It decides and does no I/O: `proxy_health` asks the servers, exchanges say how their attempts went.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from yarl import URL

from skymemory.conductor.fleet import Server
from skymemory.conductor.picker import Picker
from skymemory.conductor.request import Request
from skymemory.router.proxy_metrics import ProxyMetrics
from skymemory.router.settings import Backend, Health
from skymemory.router.tls import Authorities
from skymemory.router.upstream import Pool

log = logging.getLogger("skymemory.router")


@dataclass(slots=True, eq=False)
class Known:
    """What is known of one server beside what the fleet knows."""

    backend: Backend
    server: Server
    pool: Pool
    """Connections that requests go over."""
    tls: ssl.SSLContext | None = None
    """What its certificate is checked against; None: it is not asked over TLS."""
    failures: int = 0
    """In a row, of checks and connections."""
    successes: int = 0
    """Of checks, in a row, since it was ejected."""
    why: str = ""
    """What the last failure was."""
    gone: bool = False
    """Its address refused a connection since it was ejected: the process is not there, nor what it had cached."""
    leaving: bool = False
    """No longer in the settings; removed when its last request has ended."""
    models: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """What it lists at /v1/models, by id."""
    _urls: dict[str, URL] = field(default_factory=dict)

    def url(self, path_and_query: str) -> URL:
        """Where a request for that path goes: as it came, unchanged."""
        url = self._urls.get(path_and_query)
        if url is None:
            url = URL(self.backend.url + path_and_query, encoded=True)
            if "?" not in path_and_query:
                self._urls[path_and_query] = url
        return url

    @property
    def base_model(self) -> str:
        """The one model it serves, adapters aside; empty: not known, or several."""
        listed = [each for each, entry in self.models.items() if not entry.get("parent")]
        named = list(self.backend.models) or listed
        return named[0] if len(named) == 1 else ""

    @property
    def names(self) -> set[str]:
        """Models and adapters it is said to serve; empty: not known."""
        return {*self.backend.models, *self.models} | set(self.backend.adapters)


class Backends:
    def __init__(self, picker: Picker, metrics: ProxyMetrics, health: Health, connect_s: float = 2.0) -> None:
        self.known: dict[str, Known] = {}
        self.health = health
        self.adapters: dict[str, str] = {}
        """LoRA adapters, and the models they are for; prompts are read by it."""
        self._picker = picker
        self._metrics = metrics
        self.connect_s = connect_s
        self._authorities = Authorities()
        self._serving: dict[str, frozenset[str]] = {}

    def set(self, backends: Sequence[Backend], connect_s: float | None = None) -> None:
        """These, and no others. Who is no longer among them finishes what it has.

        Raises:
            InvalidInput: certificates that cannot be read; all stays as it was.
        """
        tls = {backend.name: self._authorities.context(backend.url, backend.ca) for backend in backends}
        self.connect_s = self.connect_s if connect_s is None else connect_s
        wanted = {backend.name: backend for backend in backends}
        for name, known in self.known.items():
            if name not in wanted:
                known.leaving = known.server.draining = True
        for name, backend in wanted.items():
            old = self.known.get(name)
            known = old or self._new(backend, self._picker.fleet.add(name), tls[name])
            if old is not None and old.backend.url != backend.url:
                self._picker.scorer.forget(old.server)
                old.pool.close()
                known = self._new(backend, old.server, tls[name])
                known.server.healthy, known.server.reported = True, None
            elif old is not None and old.tls is not tls[name]:
                old.pool.close()
                old.pool, old.tls = Pool(backend.url, self.connect_s, tls[name]), tls[name]
            self.known[name] = known
            known.pool.connect_s = self.connect_s
            known.backend, known.leaving, known.server.draining = backend, False, backend.drain
        self.let_go()
        self._learn_names()

    def _new(self, backend: Backend, server: Server, tls: ssl.SSLContext | None) -> Known:
        return Known(backend, server, Pool(backend.url, self.connect_s, tls), tls)

    def close(self) -> None:
        for known in self.known.values():
            known.pool.close()

    def let_go(self) -> bool:
        """Remove who was leaving and has nothing left to do. Whether there was somebody."""
        gone = [name for name, known in self.known.items() if known.leaving and not known.server.in_flight]
        for name in gone:
            self.known.pop(name).pool.close()
            self._picker.remove(name)
            self._metrics.forget(name)
            log.info("server %s left", name)
        return bool(gone)

    def able(self, request: Request, tried: Collection[str], max_waiting: int) -> Collection[str] | None:
        """Who may serve ``request``: not who was ``tried`` or has ``max_waiting`` (0: any). None: whoever there is."""
        serving = self._serving_it(request)
        if serving is None and not tried and not max_waiting:
            return None
        names = self.known if serving is None else serving
        return {name for name in names if name not in tried and not self._is_full(name, max_waiting)}

    def full(self, request: Request, max_waiting: int) -> bool:
        """Whether those who could serve it are there, and have as many waiting as they may."""
        serving = self._serving_it(request)
        names = [name for name in serving or self.known if self.known[name].server.takes_requests]
        return bool(names) and all(self._is_full(name, max_waiting) for name in names)

    def _serving_it(self, request: Request) -> frozenset[str] | None:
        """Who lists its adapter, if one of them is up (others may still load it), else who serves its model.

        None where that is not known: anybody may be asked, and says that it does not exist.
        """
        if request.adapter:
            listing = self._serving.get(request.adapter)
            if listing is not None and any(self.known[name].server.takes_requests for name in listing):
                return listing
        return self._serving.get(request.model)

    def _is_full(self, name: str, max_waiting: int) -> bool:
        return bool(max_waiting) and self.known[name].server.prefilling >= max_waiting

    def failed(self, name: str, why: str, gone: bool = False) -> None:
        """A check failed, or a request found nobody, or lost whoever it found."""
        known = self.known.get(name)
        if known is None:
            return
        known.failures, known.successes, known.why = known.failures + 1, 0, why
        known.gone = known.gone or gone
        if known.server.healthy and known.failures >= self.health.failures:
            known.server.healthy = False
            self._metrics.ejections.labels(name).inc()
            log.warning("server %s is ejected after %d failures in a row: %s", name, known.failures, why)

    def faulted(self, where: str) -> None:
        """An exception that is our own, and no server's."""
        self._metrics.faults.labels(where).inc()

    def answered(self, name: str) -> None:
        """A request got its first byte from it. That does not bring an ejected server back; checks do."""
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
            if known.gone:
                self._picker.scorer.forget(known.server)
            known.server.healthy, known.gone, known.successes, known.why = True, False, 0, ""
            log.warning("server %s is back", name)

    def lists(self, name: str, models: Mapping[str, Mapping[str, Any]]) -> None:
        """What a server answered at /v1/models."""
        known = self.known.get(name)
        if known is not None and known.models != models:
            known.models = dict(models)
            self._learn_names()

    def reported(self, name: str) -> None:
        """Its load report may be new, and name adapters that are."""
        known = self.known.get(name)
        report = None if known is None else known.server.reported
        if report is not None and not report.adapters <= self.adapters.keys():
            self._learn_names()

    def _learn_names(self) -> None:
        """Who serves which model, and which names are adapters: those that name a parent, or that settings or
        metrics name.
        """
        models = {name: known.names for name, known in self.known.items() if not known.leaving}
        unknown = frozenset(name for name, names in models.items() if not names)
        every = set().union(*models.values()) if models else set()
        self._serving = {
            each: unknown | {name for name, names in models.items() if each in names} for each in every if each
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
