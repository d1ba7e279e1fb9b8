"""Servers behind a router: membership, models and adapters, roles, ejection and return. No I/O.

With roles, one fleet prefills and the other decodes. Servers with both roles decode, and preferably serve requests that
cannot be split. A server drains before its role changes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from skymemory.conductor.picker import Picker, Server
from skymemory.conductor.pools import State
from skymemory.conductor.request import Request
from skymemory.router.failure.evidence import Attempts
from skymemory.router.failure.faults import Fault
from skymemory.router.failure.policy import NONE, AvoidedForProbe, FailureLimits, FailurePolicy, ServerDecision
from skymemory.router.settings import BOTH, PREFILL, Backend, Health

log = logging.getLogger("skymemory.router")


@dataclass(slots=True, eq=False)
class KnownServer:
    """Server with its settings (``backend``), load (``server``) and state."""

    backend: Backend
    server: Server
    why: str = ""  # reason of its ejection, or empty
    leaving: bool = False  # it drains to be removed or to change its role
    models: dict[str, Mapping[str, Any]] = field(default_factory=dict)  # entries of its /v1/models, by id

    answers: bool = True  # False if it only prefills
    next_backend: Backend | None = None  # settings with the new role, during a change
    configured_role: str = BOTH
    work: tuple[float, ...] | None = None  # tokens, running requests and cache usage of its last report

    @property
    def state(self) -> State:
        return "down" if not self.server.healthy else "draining" if self.server.draining else "serving"

    @property
    def base_model(self) -> str:
        """The only model it serves, apart from adapters, or empty."""
        listed = [model for model, entry in self.models.items() if not entry.get("parent")]
        named = list(self.backend.models) or listed
        return named[0] if len(named) == 1 else ""

    @property
    def names(self) -> set[str]:
        return {*self.backend.models, *self.models} | set(self.backend.adapters)


class Backends:
    """All servers by name (``known``). The fleets hold the same servers."""

    def __init__(
        self, picker: Picker, health: Health | None = None, *, are_checked: bool = True, decode: Picker | None = None
    ) -> None:
        """Create it without servers.

        Args:
            are_checked: health checks report to ``on_check``.
            decode: picker of the decode servers; None: no roles.
        """
        self.known: dict[str, KnownServer] = {}
        self.policy = FailurePolicy(are_checked=are_checked)
        self.health = health or Health()
        # LoRA adapters and their base models (empty: unknown), shared with the prompt reader.
        self.adapters: dict[str, str] = {}
        self._picker = picker
        self._decode = decode
        self._is_applying = False
        # Callbacks; `on_moved`: after a change of role.
        self.on_check_wanted: Callable[[str], None] = lambda name: None
        self.on_ejected: Callable[[str], None] = lambda name: None
        self.on_removed: Callable[[str], None] = lambda name: None
        self.on_moved: Callable[[], None] = lambda: None
        self._serving: dict[str, frozenset[str]] = {}  # servers by model or adapter

    @property
    def health(self) -> Health:
        return self._health

    @health.setter
    def health(self, health: Health) -> None:
        self._health = health
        self.policy.limits = FailureLimits(health.failures, health.successes, health.max_ejected)

    # Membership

    def set(self, backends: Sequence[Backend]) -> tuple[list[str], list[str]]:
        """Set the servers; return added and draining names. State survives unless the address changes."""
        wanted = {backend.name: backend for backend in backends}
        leave = [name for name, known in self.known.items() if name not in wanted and not known.leaving]
        for name in self.known.keys() - wanted.keys():
            self.known[name].leaving = self.known[name].server.draining = True
            self.known[name].next_backend = None
        added = []
        for name, backend in wanted.items():
            known = self.known.get(name)
            if known is None:
                self._add_server(backend)
                added.append(name)
                continue
            backend = self._with_current_role(known, backend)
            picker = self._picker_of(known)
            if self._decode is not None and self._picker_for(backend) is not picker:
                known.leaving = known.server.draining = True
                known.next_backend = backend
                continue
            if known.backend.url != backend.url:
                picker.scorer.forget(known.server)
                known = self.known[name] = KnownServer(
                    backend, known.server, answers=known.answers, configured_role=known.configured_role
                )
                known.server.healthy, known.server.reported = True, None
                self.policy.remove(name)
                self._add_to_policy(known)
            known.backend, known.leaving, known.server.draining = backend, False, backend.drain
            known.next_backend = None
        self.remove_drained()
        self._index_names()
        return added, leave

    def _add_server(self, backend: Backend) -> None:
        picker = self._picker_for(backend)
        known = KnownServer(backend, picker.fleet.add(backend.name), configured_role=backend.role)
        known.answers = self._decode is None or picker is self._decode
        known.server.draining = backend.drain
        self.known[backend.name] = known
        self._add_to_policy(known)

    def _add_to_policy(self, known: KnownServer) -> None:
        # If prefill and decode are separate, a decode server can replace the last prefill server. So none is a last
        # resort.
        self.policy.add(known.backend.name, known.answers, is_last_resort=self._decode is None)

    def remove_drained(self) -> bool:
        """Remove drained servers, or change their roles."""
        drained = [name for name, known in self.known.items() if known.leaving and not known.server.in_flight]
        for name in drained:
            known = self.known[name]
            self._picker_of(known).remove(name)
            if known.next_backend is None:
                del self.known[name]
                self.policy.remove(name)
                self.on_removed(name)
                log.info("server %s removed", name)
            else:
                self._enter_role(known, known.next_backend)
                self.on_moved()
                log.info("server %s has the role %r now", name, known.backend.role)
        if drained:
            self._index_names()
        return bool(drained)

    # Roles

    def change_role(self, name: str, role: str) -> None:
        """Drain a server, then give it ``role``. Its current role cancels a drain."""
        known = self.known.get(name)
        if known is None or (known.leaving and known.next_backend is None):
            return
        stays = known.backend.role == role
        known.next_backend = None if stays else replace(known.backend, role=role)
        known.leaving = not stays
        known.server.draining = known.leaving or known.backend.drain
        self._index_names()

    def _with_current_role(self, known: KnownServer, backend: Backend) -> Backend:
        """Keep an elastic server's current role unless its configured role has changed."""
        if backend.elastic and backend.role == known.configured_role:
            return replace(backend, role=(known.next_backend or known.backend).role)
        known.configured_role = backend.role
        return backend

    def _enter_role(self, known: KnownServer, backend: Backend) -> None:
        """Move a drained server to its new role's fleet."""
        if backend.url != known.backend.url:  # a different server with the same name
            del self.known[backend.name]
            self.policy.remove(backend.name)
            self._add_server(backend)
            return
        # It is the same process: health, models and load stay valid.
        before, picker = known.server, self._picker_for(backend)
        known.server = server = picker.fleet.add(backend.name)
        server.healthy, server.draining, server.reported = before.healthy, backend.drain, before.reported
        known.backend, known.answers = backend, picker is self._decode
        known.leaving, known.next_backend = False, None
        self._add_to_policy(known)

    def _picker_for(self, backend: Backend) -> Picker:
        return self._picker if self._decode is None or backend.role == PREFILL else self._decode

    def _picker_of(self, known: KnownServer) -> Picker:
        return self._decode if self._decode is not None and known.answers else self._picker

    def server(self, name: str) -> Server | None:
        known = self.known.get(name)
        return None if known is None else known.server

    def prefills(self, known: KnownServer) -> bool:
        return self._decode is None or not known.answers

    def role_of(self, name: str) -> str:
        known = self.known.get(name)
        return BOTH if known is None else known.backend.role

    def states(self) -> list[dict[str, object]]:
        return [
            {
                "name": name,
                "role": known.backend.role,
                "elastic": known.backend.elastic,
                "state": known.state,
                "in_flight": known.server.in_flight,
            }
            for name, known in self.known.items()
        ]

    def alone(self, request: Request, tried: Collection[str], avoid: Set[str] = NONE) -> Collection[str]:
        """Return servers that serve the request alone: those with both roles if any is up, else all that decode."""
        serving = self.serving(request)
        able = [
            known
            for name, known in self.known.items()
            if known.answers and name not in tried and (serving is None or name in serving)
        ]
        if avoid:
            remaining = self.without({known.backend.name for known in able}, avoid)
            able = [known for known in able if known.backend.name in remaining]
        both = [known for known in able if known.backend.role == BOTH]
        chosen = both if any(known.server.takes_requests for known in both) else able
        return {known.backend.name for known in chosen}

    def has_prefill(self, among: Collection[str] | None) -> bool:
        return any(among is None or server.name in among for server in self._picker.fleet.available)

    # Candidates for a request

    def able(
        self, request: Request, tried: Collection[str], max_waiting: int, avoid: Set[str] = NONE
    ) -> Collection[str] | None:
        """Return untried servers of the model (None: all) with fewer than ``max_waiting`` (0: any number) requests."""
        serving = self.serving(request)
        if not tried and not max_waiting and not avoid:
            return None if serving is None or len(serving) == len(self.known) else serving
        names = self.known if serving is None else serving
        able = {name for name in names if name not in tried and not self._is_full(name, max_waiting)}
        return self.without(able, avoid) if avoid else able

    def without(self, names: Set[str], avoid: Set[str]) -> Set[str]:
        """Exclude ``avoid`` from each fleet that has another server up."""
        remaining = {name for name in names - avoid if name in self.known}
        fleets = {self.known[name].answers for name in remaining if self.known[name].server.takes_requests}
        kept: Set[str] = {name for name in avoid & names if self.known[name].answers not in fleets}
        if kept and isinstance(avoid, AvoidedForProbe):  # the server to probe is not among ``names``, or is down
            kept = self.without(kept, avoid.failing)
        return remaining | kept

    def has_other(self, request: Request, tried: Collection[str], name: str) -> bool:
        """Return True if another server of the fleet of ``name`` is up, untried, and serves the request."""
        known, serving = self.known.get(name), self.serving(request)
        names = self.known if serving is None else serving
        return known is not None and any(
            candidate != name
            and candidate not in tried
            and (other := self.known[candidate]).server.takes_requests
            and other.answers == known.answers
            for candidate in names
        )

    def is_busy(self, request: Request, now_s: float) -> bool:
        """Return True if all servers for the request that are up reported that they are full."""
        names = [name for name in self.serving(request) or self.known if self.known[name].server.takes_requests]
        return bool(names) and all(self.policy.is_busy(name, now_s) for name in names)

    def full(self, request: Request, max_waiting: int) -> bool:
        """Return True if all servers for the request that are up have ``max_waiting`` requests."""
        serving = self.serving(request)
        names = [name for name in serving or self.known if self.known[name].server.takes_requests]
        if self._decode is not None:
            names = [name for name in names if not self.known[name].answers]
        return bool(names) and all(self._is_full(name, max_waiting) for name in names)

    def serving(self, request: Request) -> frozenset[str] | None:
        """Return the servers for the request: those that list its adapter if any is up, else its model; None: any, as
        the model is unknown.
        """
        if request.adapter:
            listing = self._serving.get(request.adapter)
            if listing is not None and any(self.known[name].server.takes_requests for name in listing):
                return listing
        return self._serving.get(request.model)

    def _is_full(self, name: str, max_waiting: int) -> bool:
        # With roles only prefill servers can be full: requests waiting at a decode server wait for their prefill
        # elsewhere.
        known = self.known[name]
        only_decodes = self._decode is not None and known.answers
        return bool(max_waiting) and known.server.prefilling >= max_waiting and not only_decodes

    # Failures: the policy decides, and `_apply_decisions` carries out its decisions.

    def on_answer(
        self, attempts: Attempts, name: str, now_s: float, is_good: bool = True, is_whole: bool = True
    ) -> None:
        self.policy.on_answer(attempts, name, now_s, is_good, is_whole)
        if self.policy.decisions:
            self._apply_decisions()

    def on_complete(self, attempts: Attempts, name: str, now_s: float, pieces: int = 0, is_good: bool = True) -> None:
        self.policy.on_complete(attempts, name, now_s, pieces, is_good)
        if self.policy.decisions:
            self._apply_decisions()

    def on_fault(self, attempts: Attempts, name: str, fault: Fault, now_s: float, wait_s: float = 0.0) -> None:
        self.policy.on_fault(attempts, name, fault, now_s, wait_s)
        self._apply_decisions()

    def on_end(self, attempts: Attempts, now_s: float) -> None:
        self.policy.on_end(attempts, now_s)
        self._apply_decisions()

    def on_dropped(self, attempts: Attempts, name: str, now_s: float) -> None:
        self.policy.on_dropped(attempts, name, now_s)
        self._apply_decisions()

    def on_check(
        self, name: str, why: str, began_s: float, now_s: float, *, is_refused: bool = False, is_reached: bool = True
    ) -> None:
        self.policy.on_check(name, why, began_s, now_s, is_refused=is_refused, is_reached=is_reached)
        self._apply_decisions()

    def review(self, now_s: float) -> None:
        self.policy.sweep(now_s)
        self._apply_decisions()

    def avoided(self, client: str, now_s: float, *, is_retry: bool = False) -> Set[str]:
        policy = self.policy
        if now_s < policy.next_sweep_s and not policy.doubted:
            return NONE
        avoided = policy.avoided(client, now_s, is_retry=is_retry)
        if policy.decisions:
            self._apply_decisions()
        return avoided

    def _apply_decisions(self) -> None:
        """Carry out the policy's decisions, including those that they cause."""
        if self._is_applying:
            return  # called by a request that moves on: the outer loop applies its decisions
        self._is_applying = True
        try:
            while self.policy.decisions:
                for decision in self.policy.take_decisions():
                    if (known := self.known.get(decision.server)) is not None:
                        self._apply_decision(known, decision)
        finally:
            self._is_applying = False

    def _apply_decision(self, known: KnownServer, decision: ServerDecision) -> None:
        name = decision.server
        match decision.kind:
            case "check":
                self.on_check_wanted(name)
            case "eject":
                known.why = decision.why
                self.on_ejected(name)
                log.warning("server %s is ejected: %s", name, decision.why)
            case "return":
                if decision.why:  # its process was restarted, so that its cache is gone
                    self._picker_of(known).scorer.forget(known.server)
                known.why = ""
                log.warning("server %s is back", name)
            case "use" | "leave":
                known.server.healthy = decision.kind == "use"
            case "move":
                for attempts in decision.attempts:
                    attempts.move_on(name, decision.why)

    # Models and adapters

    def lists(self, name: str, models: Mapping[str, Mapping[str, Any]]) -> None:
        known = self.known.get(name)
        if known is not None and known.models != models:
            known.models = dict(models)
            self._index_names()

    def reported(self, name: str) -> None:
        """Read new metrics: changed figures show that the server works."""
        known = self.known.get(name)
        if known is None or (report := known.server.reported) is None:
            return
        work = report.tokens, report.running, report.kv_usage
        self.policy.on_metrics(name, report.at_s, known.work not in (None, work))
        self._apply_decisions()
        known.work = work
        if not report.adapters <= self.adapters.keys():
            self._index_names()

    def _index_names(self) -> None:
        """Index servers by model and adapter. Outdated reports count: else a silent engine's adapter would become a
        model.
        """
        staying = {name: known for name, known in self.known.items() if not known.leaving}
        unknown = frozenset(name for name, known in staying.items() if not known.backend.models and not known.models)
        names = set().union(*(known.names for known in staying.values())) if staying else set()
        self._serving = {
            model: unknown | {name for name, known in staying.items() if model in known.names}
            for model in names
            if model
        }
        adapters: dict[str, str] = {}
        for known in self.known.values():
            bases = {model for model, entry in known.models.items() if not entry.get("parent")} | {
                *known.backend.models
            }
            only = known.base_model
            report = known.server.reported
            adapter_names = {*known.backend.adapters, *(report.adapters if report is not None else ())}
            adapters.update({model: only for model in adapter_names if model not in bases})
            adapters.update(
                {model: str(entry["parent"]) for model, entry in known.models.items() if entry.get("parent")}
            )
        self.adapters.clear()
        self.adapters.update(adapters)
