"""Access control: CORS for browsers, API keys and quotas for clients.

CORS preflights (OPTIONS with ``Access-Control-Request-Method``) carry no key, so they come before the check of keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from skymemory.addresses import ListenAddress
from skymemory.conductor.request import Request
from skymemory.router.api_error import ApiError
from skymemory.router.api_keys import ApiKeys, KeyFile, QuotaLease, read_api_keys
from skymemory.router.http.connection import Incoming, header_lines
from skymemory.router.limits.strangers import Strangers
from skymemory.router.prompts.reader import clients_of
from skymemory.router.queue import work_of
from skymemory.router.request_account import Usage
from skymemory.router.settings import ANY_ORIGIN, HEADER_NAME, CorsSettings, Settings

METHODS = ("GET", "HEAD", "POST", "OPTIONS")
_QUOTAS = tuple(f"x-ratelimit-{what}-{of}" for of in ("requests", "tokens") for what in ("limit", "remaining", "reset"))
EXPOSED = ("retry-after", "x-request-id", "x-skymemory-decision", *_QUOTAS)
_MAX_HEADERS = 64
_PREFLIGHT_VARY = "Origin, Access-Control-Request-Method, Access-Control-Request-Headers"
OPEN_PATHS = frozenset(("/health", "/ready", "/metrics"))
"""Paths without a key, for probes and Prometheus."""


class AccessControl:
    def __init__(self) -> None:
        self.keys: ApiKeys | None = None
        self.is_open = True
        self._listen = ""
        self._strangers: Strangers | None = None  # set on loopback without keys and TLS

    @staticmethod
    def read(settings: Settings) -> KeyFile | None:
        return None if settings.door.api_keys is None else read_api_keys(settings.door.api_keys)

    def configure(self, settings: Settings, file: KeyFile | None, now_s: float) -> None:
        """Apply settings. ``file``: API keys; None: none are needed."""
        if file is None:
            self.keys = None
        elif self.keys is None:
            self.keys = ApiKeys(file)
        else:
            self.keys.replace(file, now_s)
        self._cors = settings.cors
        door = settings.door
        self._listen = self._listen or settings.listen
        is_near = ListenAddress.parse(self._listen).is_local and self.keys is None and door.tls_cert is None
        self._strangers = Strangers(door.hosts, self._cors.origins) if is_near else None
        self.is_open = self.keys is None and not self._cors.origins and not is_near
        self._clients = clients_of(settings.admission)

    @property
    def weights(self) -> dict[str, float]:
        return {} if self.keys is None else self.keys.weights

    def refusal(self, request: Incoming) -> ApiError | None:
        """Return the error of a request that is not allowed; else set its tenant and CORS headers."""
        if self._strangers is not None:
            first = request.headers.first
            why = self._strangers.refusal(first.get(b"host"), first.get(b"origin"))
            if why is not None:
                return ApiError(403, why)
        if self._cors.origins:
            answer = cors(request.method, request.headers, self._cors)
            request.response_headers = header_lines(answer.headers)
            request.is_preflight, request.has_cors = answer.preflight, True
            if answer.preflight:
                return None
        if self.keys is not None and request.path not in OPEN_PATHS:
            for name in (b"authorization", b"x-api-key"):
                if len(request.headers.all_of(name)) > 1:
                    return ApiError(400, f"expected one {name.decode()} header: more may name different tenants")
            try:
                request.tenant = self.keys.tenant_of(_authorization(request.headers))
            except ApiError as error:
                return error
        return None

    def acquire(self, incoming: Incoming, request: Request, now_s: float) -> tuple[Request, QuotaLease | None]:
        """Return the request with tenant and priority, and a lease to ``release``.

        Raises:
            QuotaExceeded: 429.
        """
        tenant = incoming.tenant
        if tenant is None or self.keys is None:
            return request, None
        lease = self.keys.acquire(tenant, work_of(request), now_s)
        if lease.headers:
            incoming.response_headers += header_lines(tuple(lease.headers.items()))
        # A client may lower its priority, but not raise it above its tenant's, which the operator sets.
        clients, headers = self._clients, incoming.headers
        requested = clients.priority(headers, b"") if clients.has_priority(headers) else tenant.priority
        return replace(request, tenant=tenant.name, priority=min(requested, tenant.priority)), lease

    def release(self, lease: QuotaLease, usage: Usage | None, streamed_tokens: int | None, now_s: float) -> None:
        """Release a lease. ``streamed_tokens``: lower bound without ``usage``; None: nothing is charged."""
        if self.keys is not None:
            tokens = 0.0 if streamed_tokens is None else max(lease.tokens, streamed_tokens)
            if usage is not None:
                tokens = float(usage.prompt_tokens + (usage.output_tokens or 0))
            self.keys.release(lease, tokens, now_s)


@dataclass(frozen=True, slots=True)
class CorsAnswer:
    headers: tuple[tuple[str, str], ...] = ()  # headers even of errors: else a page cannot read the error
    preflight: bool = False  # the request asks for permission only


_NO_CORS = CorsAnswer()


def _authorization(headers: Mapping[str, str]) -> str | None:
    if (value := headers.get("authorization")) is not None:
        return value
    key = headers.get("x-api-key")
    return None if key is None else f"Bearer {key}"


def cors(method: str, headers: Mapping[str, str], settings: CorsSettings) -> CorsAnswer:
    if not settings.origins:
        return _NO_CORS
    origin = headers.get("origin")
    preflight = method == "OPTIONS" and origin is not None and "access-control-request-method" in headers
    any_may = settings.origins == (ANY_ORIGIN,)
    answer: list[tuple[str, str]] = []
    if origin is not None and (any_may or origin in settings.origins):
        answer.append(("Access-Control-Allow-Origin", ANY_ORIGIN if any_may else origin))
        if settings.credentials:
            answer.append(("Access-Control-Allow-Credentials", "true"))
        if preflight:
            answer.append(("Access-Control-Allow-Methods", ", ".join(METHODS)))
            allowed = settings.headers or _requested(headers.get("access-control-request-headers", ""))
            if allowed:
                answer.append(("Access-Control-Allow-Headers", ", ".join(allowed)))
            answer.append(("Access-Control-Max-Age", str(int(settings.max_age_s))))
        else:
            answer.append(("Access-Control-Expose-Headers", ", ".join(EXPOSED)))
    if preflight:
        answer.append(("Vary", _PREFLIGHT_VARY))
    elif not any_may:
        # A cache must not give one origin's response to another, or to a request without an origin.
        answer.append(("Vary", "Origin"))
    return CorsAnswer(tuple(answer), preflight)


def _requested(names_list: str) -> tuple[str, ...]:
    names = [name.strip() for name in names_list.split(",", _MAX_HEADERS)[:_MAX_HEADERS]]
    return tuple(name for name in names if HEADER_NAME.fullmatch(name))
