"""Settings of a router: one schema for the TOML file, the flags and the reference page."""

# ruff: noqa: RUF009 - defaults are frozen values

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from skymemory.addresses import host_and_port, without_api_path
from skymemory.conductor.cost_fit import parse
from skymemory.conductor.cost_model import PRESETS, CostModel
from skymemory.config import (
    duration,
    filled,
    one_of,
    overlaid,
    path,
    setting,
    share,
    size,
    table,
    text,
    texts,
    whole_by_name,
    whole_number,
    whole_numbers,
    yes_or_no,
)
from skymemory.errors import InvalidInput, os_reason, quoted
from skymemory.files import decode_text, read_bounded, read_toml
from skymemory.router.prefillers import PRIVATE, Prefillers
from skymemory.router.queue import QueueSettings

ANY_ORIGIN = "*"
BOTH, PREFILL, DECODE = "both", "prefill", "decode"
_SIDECAR_STRATEGY = "least-load"
ROLES = (BOTH, PREFILL, DECODE)
AFTER, OVERLAP = "after", "overlap"
BY_LOAD, REFUSE = "load", "refuse"
HANDOVERS = (AFTER, OVERLAP)
RETRIABLE = (429, 500, 502, 503, 504)
HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


def address(value: object) -> str:
    """Parse ``http://host:port`` with an optional path, a prefix of requests' paths; drop a trailing ``/v1``."""
    url = without_api_path(text(value))
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and url.isascii()
        usable = usable and not parts.netloc.endswith(":")
    except ValueError:
        usable = False
    if not usable or parts.query or parts.fragment or parts.username is not None:
        raise InvalidInput(
            f"{quoted(value)} is not the address of a server: expected one such as http://127.0.0.1:8001"
        )
    return url


def _check_origin(origin: str) -> None:
    try:
        parts = urlsplit(origin)
        is_origin = parts.scheme and parts.hostname and origin == f"{parts.scheme}://{parts.netloc}" and parts.port != 0
    except ValueError:
        is_origin = False
    if not is_origin or "@" in origin or "*" in origin or origin != origin.lower():
        raise InvalidInput(
            f"origins: {origin!r} is not an origin: expected scheme and host in lower case and nothing after them, "
            "such as https://app.example or http://localhost:3000"
        )


@dataclass(frozen=True, slots=True)
class PickerSettings:
    """Settings of `skymemory epp` alone."""

    listen: str = setting("listen", text, "127.0.0.1:9002", "address for Envoy (gRPC); port 0: any that is free")
    health_listen: str = setting(
        "health_listen", text, "", "gRPC health checks without TLS, for probes that cannot use it"
    )
    metrics_listen: str = setting("metrics_listen", text, "", "HTTP /metrics for Prometheus; empty: none")
    endpoints: Path | None = setting(
        "endpoints", path, None, "a file of endpoints instead of [[backends]], one per line; reloaded when it changes"
    )
    discover: str = setting("discover", text, "", "NAME:PORT instead: every address of a DNS name is an endpoint")
    discover_prefill: str = setting(
        "discover_prefill", text, "", "the same of servers with role `prefill`, beside those of `discover`"
    )
    apart: bool = setting(
        "apart", yes_or_no, False, "lines of `endpoints` have roles (`role=prefill`): prefill and decode are apart"
    )
    refresh_s: float = setting("refresh", duration, 5.0, "period of reading those")
    events_port: int = setting(
        "events_port", whole_number, 0, "port of KV events of endpoints without `events`; 0: none"
    )
    replay_port: int = setting("replay_port", whole_number, 0, "port of their replays; 0: none")
    model: str = setting("model", text, "", "served by endpoints without `models`; KV events need it")
    fallbacks: int = setting("fallbacks", whole_number, 0, "further endpoints named to Envoy, best first")
    max_requests: int = setting(
        "max_requests", whole_number, 0, "at one server; 429 where all have as many. 0: any number"
    )
    max_streams: int = setting("max_streams", whole_number, 10_000, "requests in flight in this picker; more: 429")
    tell_decisions: bool = setting(
        "tell_decisions", yes_or_no, False, "send routing decisions to clients that ask for them (x-skymemory-decision)"
    )
    self_signed: bool = setting(
        "self_signed", yes_or_no, False, "TLS with a self-signed certificate, made at the start"
    )
    tls_cert: Path | None = setting("tls_cert", path, None, "certificate chain (PEM)")
    tls_key: Path | None = setting("tls_key", path, None, "its key (PEM)")
    tls_client_ca: Path | None = setting(
        "tls_client_ca", path, None, "authority (PEM) of clients' certificates; others are refused"
    )

    def __post_init__(self) -> None:
        for listen in (self.listen, self.health_listen, self.metrics_listen):
            if listen:
                host_and_port(listen)
        if self.refresh_s <= 0:
            raise InvalidInput("refresh: expected a time above 0")
        if self.max_streams < 1:
            raise InvalidInput("max_streams: expected a number above 0")
        if self.endpoints is not None and self.discover:
            raise InvalidInput("set `endpoints` or `discover`, not both")
        if self.discover_prefill and not self.discover:
            raise InvalidInput("`discover_prefill` needs `discover`: the servers that answer")
        if self.apart and self.endpoints is None:
            raise InvalidInput("`apart` is about lines of `endpoints`: backends say by `role` that they are apart")
        if max(self.events_port, self.replay_port) > 65_535:
            raise InvalidInput("events_port, replay_port: ports go to 65535")
        if self.self_signed and (self.tls_cert or self.tls_key):
            raise InvalidInput("set self_signed, or tls_cert and tls_key, not both")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise InvalidInput("tls_cert and tls_key go together")
        if self.tls_client_ca and not self.tls_cert:
            raise InvalidInput("tls_client_ca needs tls_cert and tls_key")


@dataclass(frozen=True, slots=True)
class Backend:
    url: str = setting("url", address, "", "its address, such as http://host:port")
    name: str = setting("name", text, "", "in metrics and decisions; default: host:port")
    models: tuple[str, ...] = setting("models", texts, (), "models it serves; default: its /v1/models")
    adapters: tuple[str, ...] = setting("adapters", texts, (), "LoRA adapters it can serve")
    events: str = setting("events", text, "", "address of its KV events, such as tcp://host:5557; empty: none")
    replay: str = setting("replay", text, "", "address for replays of events, such as tcp://host:5558; empty: none")
    topic: str = setting("topic", text, "", "prefix of its events' topics; empty: all")
    drain: bool = setting("drain", yes_or_no, False, "it finishes its requests and gets no new ones")
    ca: Path | None = setting(
        "ca", path, None, "authorities (PEM) of an https server's certificate; default: the system's"
    )
    api_key_file: Path | None = setting(
        "api_key_file", path, None, "a file with the server's API key, which replaces clients' keys"
    )
    role: str = setting(
        "role",
        one_of(*ROLES),
        BOTH,
        "both; or prefill, or decode: requests are prefilled at one and answered by another",
    )
    elastic: bool = setting(
        "elastic",
        yes_or_no,
        False,
        "it can do both, and its role follows the load; `role` is the one that it begins with",
    )

    def __post_init__(self) -> None:
        if not self.url:
            raise InvalidInput("a backend needs its `url`, such as http://127.0.0.1:8001")
        if self.elastic and self.role == BOTH:
            raise InvalidInput(
                f"{self.name or self.url}: elastic: set the role that it begins with, 'prefill' or 'decode'"
            )
        if self.ca is not None and not self.url.startswith("https:"):
            raise InvalidInput(f"`ca` is for https servers, and {self.url} is none")
        if not self.name:
            object.__setattr__(self, "name", urlsplit(self.url).netloc)


@dataclass(frozen=True, slots=True)
class Prompts:
    """Rules for cutting prompts into blocks, to match them with caches."""

    tokenizer: Path | None = setting(
        "tokenizer", path, None, "a tokenizer.json, or a folder with one: blocks are then counted in tokens, not bytes"
    )
    block_tokens: int = setting("block_tokens", whole_number, 16, "the engine's block size (with a tokenizer)")
    block_bytes: int = setting("block_bytes", whole_number, 64, "bytes of text per block (without a tokenizer)")
    max_blocks: int = setting(
        "max_blocks", whole_number, 8192, "blocks hashed of a prompt; the rest does not influence routing"
    )
    session_header: str = setting("session_header", text, "x-session-id", "header that identifies a session")
    session_cookie: str = setting("session_cookie", text, "session", "cookie that does, without the header")


@dataclass(frozen=True, slots=True)
class Limits:
    max_body_bytes: int = setting("max_body", size, 16 << 20, "larger bodies are refused: 413")
    max_in_flight: int = setting("max_in_flight", whole_number, 4096, "requests in flight; more are refused: 429")
    max_held_bytes: int = setting(
        "max_held", size, 512 << 20, "memory of request bodies, in total; at least four times `max_body`"
    )
    least_rate: int = setting(
        "least_rate", size, 1024, "bytes per second of a body, which may pause for 20 s; slower: 408"
    )
    max_waiting: int = setting(
        "max_waiting",
        whole_number,
        0,
        "requests at one server without a first byte; 429 where all have as many. 0: any number",
    )

    @property
    def most_held_bytes(self) -> int:
        return max(self.max_held_bytes, 4 * self.max_body_bytes)


@dataclass(frozen=True, slots=True)
class Timeouts:
    connect_s: float = setting("connect", duration, 2.0, "for a connection to a server")
    first_byte_s: float = setting("first_byte", duration, 600.0, "for the first byte of a response")
    idle_s: float = setting("idle", duration, 120.0, "between two pieces of a response")
    client_s: float = setting("client", duration, 60.0, "for a client to send its body, or to read its response")
    head_s: float = setting("head", duration, 10.0, "for a request's head, from its first byte, or a TLS handshake")
    keep_alive_s: float = setting("keep_alive", duration, 75.0, "before an idle connection is closed")


@dataclass(frozen=True, slots=True)
class Door:
    tls_cert: Path | None = setting("tls_cert", path, None, "certificate chain (PEM): HTTPS")
    tls_key: Path | None = setting("tls_key", path, None, "its key (PEM)")
    api_keys: Path | None = setting(
        "api_keys",
        path,
        None,
        "a file of API keys, tenants and quotas (`skymemory keys api`); default: no key is needed",
    )
    hosts: tuple[str, ...] = setting(
        "hosts",
        texts,
        (),
        "names that requests may call the router by, on loopback without keys and TLS, beside addresses, localhost and "
        'names without a dot; "*": any',
    )

    def __post_init__(self) -> None:
        if bool(self.tls_cert) != bool(self.tls_key):
            raise InvalidInput("tls_cert and tls_key go together")


@dataclass(frozen=True, slots=True)
class CorsSettings:
    """Web pages that may use the router (CORS)."""

    origins: tuple[str, ...] = setting(
        "origins", texts, (), 'their origins, such as https://app.example; "*": any; empty: none'
    )
    headers: tuple[str, ...] = setting("headers", texts, (), "request headers they may send; empty: any they ask for")
    credentials: bool = setting("credentials", yes_or_no, False, "browsers may send cookies and other credentials")
    max_age_s: float = setting("max_age", duration, 600.0, "how long browsers cache the answer to a preflight")

    def __post_init__(self) -> None:
        for origin in self.origins:
            if origin != ANY_ORIGIN:
                _check_origin(origin)
        if ANY_ORIGIN in self.origins and len(self.origins) > 1:
            raise InvalidInput('origins: "*" is any origin; leave out the others')
        if self.credentials and ANY_ORIGIN in self.origins:
            raise InvalidInput('credentials: browsers send none where origins are "*"; name the origins')
        for name in self.headers:
            if not HEADER_NAME.fullmatch(name):
                raise InvalidInput(f"headers: {name!r} is not the name of a header; expected one such as X-Request-Id")


@dataclass(frozen=True, slots=True)
class Health:
    path: str = setting("path", text, "/health", "of the check; a status from 200 to 299 is healthy")
    every_s: float = setting("every", duration, 2.0, "period of checks")
    timeout_s: float = setting("timeout", duration, 2.0, "for the answer to a check")
    failures: int = setting(
        "failures",
        whole_number,
        3,
        "consecutive failed checks that eject a server; where requests fail there, too, one does",
    )
    successes: int = setting("successes", whole_number, 2, "consecutive good checks that bring it back")
    max_ejected: float = setting(
        "max_ejected",
        share,
        0.5,
        "largest share of the servers that may be ejected; beyond, all are used but those without a connection",
    )
    metrics_path: str = setting("metrics_path", text, "/metrics", "path of an engine's metrics; empty: not read")
    metrics_every_s: float = setting("metrics_every", duration, 1.0, "period of reading metrics")
    models_every_s: float = setting("models_every", duration, 30.0, "period of reading models and adapters")


@dataclass(frozen=True, slots=True)
class Retries:
    """Retries on other servers, and of streams that break."""

    most: int = setting(
        "most",
        whole_number,
        2,
        "retries of a request, which is sent 1 + `most` times at most, replays on a new connection included",
    )
    statuses: tuple[int, ...] = setting(
        "statuses", whole_numbers, (429, 500, 502, 503, 504), "responses that are retried (a 500 once)"
    )
    continue_streams: bool = setting(
        "continue_streams",
        yes_or_no,
        True,
        "a stream whose server fails goes on at another one, which gets the text so far as the end of its prompt; each "
        "time counts as a retry",
    )
    budget: float = setting(
        "budget",
        share,
        0.2,
        "retries of all requests, as a share of the requests of the last 10 s or under way, whichever are more",
    )
    floor: int = setting("floor", whole_number, 3, "retries in 10 s that are always allowed")

    def __post_init__(self) -> None:
        for status in self.statuses:
            if status not in RETRIABLE:
                raise InvalidInput(
                    f"statuses: {status}: expected some of {', '.join(map(str, RETRIABLE))}; other responses are the "
                    "client's"
                )


@dataclass(frozen=True, slots=True)
class Disaggregation:
    """Prefill and decode at separate servers."""

    handover: str = setting(
        "handover",
        one_of(*HANDOVERS),
        AFTER,
        "when the decode server is asked: after the prefill; overlap: at the same time, for engines that fetch values "
        "while they are computed (our connector)",
    )
    split_from: int = setting(
        "split_from",
        whole_number,
        64,
        "tokens, as the router counts them: a prompt of which a decode server lacks fewer takes one step, there; 0: "
        "all take two. (A sidecar goes by the header alone)",
    )
    prefill_s: float = setting("prefill", duration, 120.0, "for the answer of a prefill server")
    fallback: bool = setting(
        "fallback",
        yes_or_no,
        True,
        "the decode server computes the prompt, too, where prefill failed; false: 502, or 503",
    )

    def __post_init__(self) -> None:
        if self.prefill_s <= 0:
            raise InvalidInput("prefill: expected a time above 0")


@dataclass(frozen=True, slots=True)
class ElasticPools:
    """Roles that follow the load. A server drains before its role changes."""

    every_s: float = setting("every", duration, 1.0, "period of measuring the loads")
    smoothing_s: float = setting("smoothing", duration, 20.0, "time constant of the loads")
    settle_s: float = setting("settle", duration, 20.0, "least time between the end of a change and the next")
    most_drain_s: float = setting("most_drain", duration, 900.0, "a change that takes longer is called off")

    def __post_init__(self) -> None:
        if self.every_s <= 0 or self.most_drain_s <= 0:
            raise InvalidInput("elastic: every and most_drain: expected a time above 0")


@dataclass(frozen=True, slots=True)
class SidecarSettings:
    """Settings of `skymemory route` as the sidecar of a decode engine."""

    engine: str = setting(
        "engine", text, "", "address of the decode engine, such as http://127.0.0.1:8200; empty: none"
    )
    prefillers: tuple[str, ...] = setting(
        "prefillers",
        texts,
        PRIVATE,
        "prefill servers that a header may name: networks, addresses or host names, perhaps with a port",
    )

    def __post_init__(self) -> None:
        if self.engine:
            address(self.engine)
        Prefillers(self.prefillers)  # check the entries


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """Exchange with other routers before the same servers: prefixes, requests and speeds."""

    redis: str = setting("redis", text, "", "a Redis or Valkey server, such as redis://host:6379/0")
    listen: str = setting("listen", text, "", "address and port for other routers, in a trusted network; empty: none")
    peers: tuple[str, ...] = setting(
        "peers",
        texts,
        (),
        "other routers, such as router-1:7070, or a name that stands for all; this router's own address may be among "
        "them",
    )
    keys: Path | None = setting(
        "keys",
        path,
        None,
        "a file of keys (`skymemory keys new`), the same for all replicas, which authenticates updates",
    )
    every_s: float = setting("every", duration, 0.1, "period of the exchange")
    silent_s: float = setting("silent", duration, 5.0, "silence after which another router's requests count no more")

    @property
    def are_set(self) -> bool:
        return bool(self.redis or self.listen or self.peers)

    def __post_init__(self) -> None:
        if self.listen:
            host_and_port(self.listen)
        for peer in self.peers:
            _, port = host_and_port(peer)
            if not port:
                raise InvalidInput(f"peers: {peer!r}: expected the port of another router, such as router-1:7070")
        if not 0.005 <= self.every_s <= 1.0 or self.silent_s < 2.0:
            raise InvalidInput("replicas: every: expected 5 ms to 1 s; silent: 2 s or more")


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    rule: str = setting("rule", text, "all", "all, baseline, early, predicted, goodput")
    ttft_s: float = setting("ttft", duration, 0.0, "promised time to the first token; every rule but all needs it")
    tbt_s: float = setting("tbt", duration, 0.0, "promised time between tokens; measured and counted. 0: none")
    fair: bool = setting("fair", yes_or_no, False, "priorities and fair shares of tenants, applied before the rule")
    tenant_header: str = setting(
        "tenant_header", text, "", "header that names a tenant; else its API key identifies it, else `user` of the body"
    )
    priority_header: str = setting(
        "priority_header", text, "x-skymemory-priority", "header with a request's priority; empty: none"
    )
    objectives: Mapping[str, int] = setting(
        "objectives",
        whole_by_name,
        {},
        "priorities of the Gateway API's InferenceObjectives by name; higher goes first",
    )
    options: Mapping[str, object] = setting("options", table, {}, "of the rule and of fairness, by name")


@dataclass(frozen=True, slots=True)
class Settings:
    backends: tuple[Backend, ...] = ()
    prompts: Prompts = Prompts()
    limits: Limits = Limits()
    timeouts: Timeouts = Timeouts()
    health: Health = Health()
    retries: Retries = Retries()
    disaggregation: Disaggregation = Disaggregation()
    elastic: ElasticPools = ElasticPools()
    sidecar: SidecarSettings = SidecarSettings()
    replicas: ReplicaSettings = ReplicaSettings()
    admission: AdmissionSettings = AdmissionSettings()
    door: Door = Door()
    cors: CorsSettings = CorsSettings()
    queue: QueueSettings = QueueSettings()
    picker: PickerSettings = PickerSettings()
    options: Mapping[str, Any] = field(default_factory=dict)
    listen: str = setting("listen", text, "127.0.0.1:8080", "address and port; port 0: any that is free")
    strategy: str | None = setting("strategy", text, None, "the routing strategy")
    seed: int = setting("seed", whole_number, 0, "of random tie-breaking")
    drain_s: float = setting("drain", duration, 30.0, "for requests to end, when the router stops")
    unknown_paths: str = setting(
        "unknown_paths",
        one_of(BY_LOAD, REFUSE, ""),
        "",
        "requests of paths that it does not know: load (to the server with the least load) or refuse (404). Default: "
        "refuse at `route`, load at `epp`, which a gateway asks about paths that it has let in",
    )
    log_requests: bool = setting("log_requests", yes_or_no, False, "one line per request")
    state: Path | None = setting("state", path, None, "file that keeps the prefix index over restarts")
    cost: Path | None = setting(
        "cost", path, None, "prefill cost model: a file of `skymemory fit`, or a preset; default: learned (least-ttft)"
    )

    @property
    def splits(self) -> bool:
        is_configured = bool(self.sidecar.engine or self.picker.discover_prefill) or self.picker.apart
        return is_configured or any(backend.role != BOTH for backend in self.backends)

    @property
    def has_elastic(self) -> bool:
        return any(backend.elastic for backend in self.backends)

    def __post_init__(self) -> None:
        host_and_port(self.listen)
        if self.has_elastic:
            self._check_elastic()
        if self.sidecar.engine:
            if self.backends and self.backends != (local := self._local_engine(),):
                raise InvalidInput(f"sidecar: its engine is the only server; leave out the backends ({local.url})")
            object.__setattr__(self, "backends", (self._local_engine(),))
            if self.strategy not in (None, _SIDECAR_STRATEGY):
                raise InvalidInput("sidecar: requests name their prefill server; leave out `strategy`")
            object.__setattr__(self, "strategy", _SIDECAR_STRATEGY)
            if self.admission.rule != "all" or self.admission.fair:
                raise InvalidInput("sidecar: the picker in front of it admits requests; leave out `admission`")
        elif self.splits and self.backends:
            roles = {backend.role for backend in self.backends}
            if PREFILL not in roles:
                raise InvalidInput("backends: a server with role 'decode' needs one with role 'prefill'")
            if roles == {PREFILL}:
                raise InvalidInput("backends: servers with role 'prefill' need one with role 'decode' or 'both'")
        names = [backend.name for backend in self.backends]
        duplicates = sorted({name for name in names if names.count(name) > 1})
        if duplicates:
            raise InvalidInput(f"two backends are named {duplicates[0]!r}: names must differ")
        if self.prompts.block_bytes < 1 or self.prompts.block_tokens < 1 or self.prompts.max_blocks < 1:
            raise InvalidInput("prompts: block_bytes, block_tokens and max_blocks must be at least 1")
        if self.health.every_s <= 0 or self.health.failures < 1 or self.health.successes < 1:
            raise InvalidInput("health checks: `every` must be above 0, `failures` and `successes` at least 1")
        if self.queue.most_requests and not (self.limits.max_waiting or self.picker.max_requests):
            raise InvalidInput(
                "queue: requests wait until a server has room, so set how many requests make one full: "
                "limits: max_waiting (route), picker: max_requests (epp)"
            )
        limits = self.limits
        if min(limits.max_in_flight, limits.max_body_bytes, limits.max_held_bytes, limits.least_rate) < 1:
            raise InvalidInput("limits: `max_in_flight`, `max_body`, `max_held` and `least_rate` must be above 0")
        if self.timeouts.head_s <= 0:
            raise InvalidInput("timeouts: `head` must be above 0")

    def _check_elastic(self) -> None:
        if not (self.admission.ttft_s and self.admission.tbt_s):
            raise InvalidInput(
                "backends: elastic: set the objectives, which say how much load a pool can take: admission: ttft "
                "and tbt"
            )
        if self.replicas.are_set:
            raise InvalidInput("backends: elastic: one router decides on the roles; leave out `replicas`")

    def _local_engine(self) -> Backend:
        return Backend(self.sidecar.engine, role=DECODE)


SECTIONS: Mapping[str, type[Any]] = {
    "prompts": Prompts,
    "limits": Limits,
    "timeouts": Timeouts,
    "health": Health,
    "retries": Retries,
    "disaggregation": Disaggregation,
    "elastic": ElasticPools,
    "sidecar": SidecarSettings,
    "replicas": ReplicaSettings,
    "admission": AdmissionSettings,
    "queue": QueueSettings,
    "door": Door,
    "cors": CorsSettings,
    "picker": PickerSettings,
}


def read_settings(file: Path | None, flags: Mapping[str, Any] | None = None) -> Settings:
    """Read ``file``; ``flags``, a table of the same form, take precedence.

    Raises:
        InvalidInput: an unreadable file, an unknown key, or an invalid value.
    """
    table: dict[str, Any] = {} if file is None else read_toml(file)
    where = "the flags" if file is None else str(file)
    try:
        return settings_from(overlaid(table, flags or {}))
    except InvalidInput as error:
        raise InvalidInput(f"{where}: {error}") from error


def settings_from(table: Mapping[str, Any]) -> Settings:
    # Each section is a table of its own; the other top-level keys are the router's own settings.
    sections = {name: filled(kind, _table(table.get(name, {}), name), name) for name, kind in SECTIONS.items()}
    options = _table(table.get("options", {}), "options")
    backends = table.get("backends", [])
    if not isinstance(backends, list):
        raise InvalidInput("backends: expected [[backends]] tables, one for each")
    parsed = [filled(Backend, _backend(entry), f"backends, number {at}") for at, entry in enumerate(backends, 1)]
    own = {key: value for key, value in table.items() if key not in {*SECTIONS, "options", "backends"}}
    return filled(
        Settings, own, "", [*SECTIONS, "options", "backends"], backends=tuple(parsed), options=dict(options), **sections
    )


def _table(value: object, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidInput(f"{name}: expected a table, [{name}]")
    return value


def _backend(value: object) -> Mapping[str, Any]:
    return {"url": value} if isinstance(value, str) else _table(value, "backends")


def read_cost(file: Path) -> CostModel:
    """Return the cost model in ``file`` (JSON or TOML), or the preset of that name."""
    if str(file) in PRESETS and not file.exists():
        return PRESETS[str(file)]
    try:
        return parse(decode_text(read_bounded(file)))
    except (OSError, InvalidInput) as error:
        reason = os_reason(error) if isinstance(error, OSError) else str(error)
        hint = f"; expected a file or one of {', '.join(PRESETS)}" if isinstance(error, FileNotFoundError) else ""
        raise InvalidInput(f"cost model {file}: {reason}{hint}") from error
