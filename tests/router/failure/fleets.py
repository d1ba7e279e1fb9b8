"""A fleet in virtual time: servers that answer, fail, refuse or hang, clients, and the policy between them."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from skymemory.router.failure.evidence import Attempts
from skymemory.router.failure.faults import Fault
from skymemory.router.failure.policy import FailureLimits, FailurePolicy
from skymemory.router.failure.silence import WHOLE

WELL, HANGS = "well", "hangs"


@dataclass
class VirtualServer:
    name: str
    state: str | Fault = WELL
    """What it does with a request: a fault, at once."""
    service_s: float = 0.05
    is_healthy: bool = True
    """By its checks."""
    got: int = 0
    load: int = 0


@dataclass(eq=False)
class VirtualRequest:
    client: str
    kills: bool = False
    """Each server closes its connection."""
    service_s: float | None = None
    """None: the server's."""
    answered_s: float | None = None
    failed: bool = False
    attempts: Attempts = field(init=False)
    at: str = ""
    tried: set[str] = field(default_factory=set)
    sends: int = 0

    def __post_init__(self) -> None:
        self.attempts = Attempts(self.client)


class VirtualFleet:
    """Sends to the server with the least load that the policy does not avoid; three sends of a request at most."""

    def __init__(
        self,
        servers: int = 3,
        *,
        are_checked: bool = True,
        limits: FailureLimits = FailureLimits(),  # noqa: B008
        have_metrics: bool = True,
    ) -> None:
        self.servers = {f"s{number}": VirtualServer(f"s{number}") for number in range(servers)}
        self.policy = FailurePolicy(limits, are_checked=are_checked)
        for name in self.servers:
            self.policy.add(name)
        self.now_s = 0.0
        self.used = set(self.servers)
        self.ejections: Counter[str] = Counter()
        self.requests: list[VirtualRequest] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        if have_metrics:
            self._read_metrics_forever()
        for name in self.servers if are_checked else ():
            self.after(2.0, lambda name=name: self._check_forever(name))  # type: ignore[misc]

    def after(self, wait_s: float, work: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + wait_s, next(self._order), work))

    def run(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        review_s = self.now_s
        while True:
            due_s = min(self._events[0][0] if self._events else end_s, review_s, end_s)
            self.now_s = max(self.now_s, due_s)
            if due_s >= end_s:
                return
            if due_s == review_s:
                self.policy.sweep(self.now_s)
                review_s += 0.1
            else:
                heapq.heappop(self._events)[2]()
            self._apply()

    def send(self, client: str = "c", *, kills: bool = False, service_s: float | None = None) -> VirtualRequest:
        request = VirtualRequest(client, kills, service_s)
        self.requests.append(request)
        self.policy.on_request(client, self.now_s)
        self._send(request)
        self._apply()
        return request

    def _send(self, request: VirtualRequest) -> None:
        avoid = self.policy.avoided(request.client, self.now_s, is_retry=bool(request.tried))
        self._apply()
        able = [each for name, each in self.servers.items() if name in self.used and name not in request.tried]
        able = [each for each in able if each.name not in avoid] or able
        if not able or request.sends == 3:
            request.failed = True
            self.policy.on_end(request.attempts, self.now_s)
            return
        server = min(able, key=lambda each: each.load)
        request.at, request.sends = server.name, request.sends + 1
        server.got += 1
        server.load += 1
        self.policy.on_sent(request.attempts, server.name, self.now_s, 0.0, WHOLE)
        state: str | Fault = Fault.RESET if request.kills else server.state
        if isinstance(state, Fault):
            self.after(0.001, lambda: self._fails(request, server, state))
        elif state == WELL:
            service_s = server.service_s if request.service_s is None else request.service_s
            self.after(service_s, lambda: self._answers(request, server))

    def _fails(self, request: VirtualRequest, server: VirtualServer, fault: Fault) -> None:
        if request.at == server.name:
            server.load -= 1
            self.policy.on_fault(request.attempts, server.name, fault, self.now_s)
            self._again(request, server)

    def _again(self, request: VirtualRequest, server: VirtualServer) -> None:
        request.at = ""
        request.tried.add(server.name)
        self.after(0.02, lambda: self._send(request))

    def _answers(self, request: VirtualRequest, server: VirtualServer) -> None:
        if request.at == server.name:
            server.load -= 1
            request.at, request.answered_s = "", self.now_s
            self.policy.on_answer(request.attempts, server.name, self.now_s)

    def recover(self, name: str) -> None:
        server = self.servers[name]
        server.state, server.is_healthy = WELL, True
        for request in self.requests:
            if request.at == name:
                self.after(0.05, lambda request=request: self._answers(request, server))  # type: ignore[misc]

    def _read_metrics_forever(self) -> None:
        """Every server that works counts more tokens while it has requests."""
        for name, server in self.servers.items():
            self.policy.on_metrics(name, self.now_s, server.state == WELL and server.load > 0)
        self.after(0.5, self._read_metrics_forever)

    def _check_forever(self, name: str) -> None:
        self._check(name)
        self.after(2.0, lambda: self._check_forever(name))

    def _check(self, name: str) -> None:
        server, began_s = self.servers[name], self.now_s
        if server.state == HANGS and not server.is_healthy:
            self.after(2.0, lambda: self.policy.on_check(name, "no answer within 2 s", began_s, self.now_s))
        elif server.state is Fault.REFUSED:
            self.policy.on_check(name, "refused", began_s, self.now_s, is_refused=True, is_reached=False)
        else:
            why = "" if server.is_healthy else "503"
            self.after(0.002, lambda: self.policy.on_check(name, why, began_s, self.now_s))

    def _apply(self) -> None:
        while self.policy.decisions:
            for decision in self.policy.take_decisions():
                name = decision.server
                if decision.kind == "check":
                    self._check(name)
                elif decision.kind == "eject":
                    self.ejections[name] += 1
                elif decision.kind == "use":
                    self.used.add(name)
                elif decision.kind == "leave":
                    self.used.discard(name)
                elif decision.kind == "move":
                    for request in [each for each in self.requests if each.attempts in decision.attempts]:
                        if request.at == name:
                            self.servers[name].load -= 1
                            self.policy.on_fault(request.attempts, name, Fault.SILENT, self.now_s)
                            self._again(request, self.servers[name])
