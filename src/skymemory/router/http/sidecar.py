"""Front end of a decode engine (``[sidecar]``) for pickers that name the prefill server in a header.

As in llm-d's sidecar, ``x-prefiller-host-port`` (later ``x-llm-d-prefiller-host-port``) lists ``host:port``: the first
prefills, the others are fallbacks; the local engine answers. The older header wins: pickers of all releases remove it
from client requests. Other requests go to the local engine, except the sidecar's pages.

Only allowed hosts may be named (``prefillers``), else 403.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import lru_cache

from skymemory.conductor.picker import Picker
from skymemory.errors import InvalidInput
from skymemory.router.api_error import ApiError
from skymemory.router.http.connection import Incoming
from skymemory.router.http.exchange import Exchanges, RequestLog
from skymemory.router.http.proxy import Proxy
from skymemory.router.http.two_steps import PREFILLER_HEADERS, TwoStepExchange
from skymemory.router.http.upstream import Pools
from skymemory.router.prefillers import HEADER, LATER_HEADER, Prefillers, read_host_port
from skymemory.router.prompts.reader import PROMPT_PATHS
from skymemory.router.router_metrics import ProxyMetrics
from skymemory.router.settings import Backend

MAX_NAMED = 16
MAX_KNOWN = 256
OWN = "/sidecar"
_OWN_PAGES = frozenset(OWN + page for page in ("/health", "/ready", "/metrics"))
_OLD, _NEW = HEADER.encode(), LATER_HEADER.encode()
_DATA_PARALLEL = b"x-data-parallel-host-port"


class NamedPrefillers:
    """Prefill servers that requests have named; beyond ``MAX_KNOWN`` the longest unused is removed."""

    def __init__(self, picker: Picker, pools: Pools, metrics: ProxyMetrics) -> None:
        self._picker = picker
        self._pools = pools
        self._metrics = metrics

    def member(self, host: str, port: int, connect_s: float) -> str:
        """Return the server's name, if need be after adding it."""
        name = host_port(host, port)
        servers = self._picker.fleet.servers
        if name in servers:
            servers[name] = servers.pop(name)  # to the end: least recently named first
            return name
        if len(servers) >= MAX_KNOWN:
            idle = next((server.name for server in servers.values() if not server.in_flight), None)
            if idle is not None:
                self._picker.remove(idle)
                self._pools.drop(idle)
                self._metrics.forget(idle)
        self._picker.fleet.add(name)
        self._pools.set((Backend(f"http://{name}", name),), connect_s)
        return name


_allow_list = lru_cache(maxsize=4)(Prefillers)


def host_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class SidecarExchange(TwoStepExchange):
    _left_out_headers = PREFILLER_HEADERS | {_DATA_PARALLEL}

    def __init__(
        self,
        prefillers: NamedPrefillers,
        shared: Exchanges,
        incoming: Incoming,
        done: Callable[[Incoming, RequestLog], None],
    ) -> None:
        super().__init__(shared, incoming, done)
        self._prefillers = prefillers
        self._named_prefillers: list[tuple[str, int]] = []

    def begin(self) -> None:
        try:
            self._named_prefillers = self._read_named_prefillers()
        except ApiError as error:
            self._answer_error(error)
            return
        super().begin()

    def _read_named_prefillers(self) -> list[tuple[str, int]]:
        headers = self.incoming.headers
        values = headers.all_of(_OLD) or headers.all_of(_NEW)
        words = [word.strip() for value in values for word in value.decode("latin-1").split(",") if word.strip()]
        if len(words) > MAX_NAMED:
            raise ApiError(400, f"{_OLD.decode()} names {len(words)} servers; at most {MAX_NAMED} are allowed")
        allowed = _allow_list(self._shared.settings.sidecar.prefillers)
        prefillers = []
        for word in words:
            try:
                host, port = read_host_port(word)
            except InvalidInput as error:
                raise ApiError(400, f"{_OLD.decode()}: {error}") from error
            if not allowed.allow(host, port):
                raise ApiError(
                    403, f"{_OLD.decode()}: {word!r} is not among the allowed prefill servers (sidecar: prefillers)"
                )
            prefillers.append((host, port))
        return prefillers

    @property
    def _has_no_retry_left(self) -> bool:
        return True  # there is only one engine: even its 503 is passed on

    @property
    def _split_from_tokens(self) -> int:
        return 0  # the picker has decided, and counts a prefill if it named a server

    def _split_if_possible(self) -> None:
        """Split only if the request names a prefill server other than the local engine."""
        local = {known.backend.url for known in self._shared.backends.known.values()}
        if not self._named_prefillers or any(
            f"http://{host_port(*named)}" in local for named in self._named_prefillers[:1]
        ):
            self._choose_single_server("no-header")
        else:
            super()._split_if_possible()

    def _get_prefill_servers(self) -> Collection[str]:
        connect_s = self._shared.settings.timeouts.connect_s
        for host, port in self._named_prefillers:
            if host_port(host, port) not in self._tried_servers:
                return {self._prefillers.member(host, port, connect_s)}
        return ()


class SidecarProxy(Proxy):
    """Proxy of all engine paths; its own are below ``/sidecar``."""

    def refusal(self, request: Incoming) -> ApiError | None:
        if not self._access.is_open:
            refusal = self._access.refusal(request)
            if refusal is not None or request.is_preflight:
                return refusal
        if request.path in PROMPT_PATHS and request.method != "POST":
            return ApiError(405, f"{request.path} takes POST, not {request.method}")
        return None

    def _goes_to_server(self, path: str) -> bool:
        return path not in _OWN_PAGES

    def _answer_own_page(self, request: Incoming) -> None:
        request.path = request.path.removeprefix(OWN)
        super()._answer_own_page(request)

    def _on_request_end(self, request: Incoming, result: RequestLog) -> None:
        if request.path not in PROMPT_PATHS:
            result.ttft_s = None  # a page has no first token
        super()._on_request_end(request, result)
