"""How a router is set up: one schema, for the file, for the flags, and for the page that documents it.

Every field says by which key it is written, and how what is written there is read; `settings_file` does the rest.
"""

from __future__ import annotations

import asyncio
import dataclasses
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from skymemory.conductor.cost_model import PRESETS, CostModel
from skymemory.conductor.cost_model.fit import parse
from skymemory.config import suggestion
from skymemory.errors import InvalidInput
from skymemory.files import read_bounded
from skymemory.router.cors import CorsSettings
from skymemory.router.queue import QueueSettings
from skymemory.router.setting_values import (
    address,
    duration,
    host_and_port,
    path,
    setting,
    size,
    table,
    text,
    texts,
    whole,
    whole_by_name,
    wholes,
    yes_or_no,
)
from skymemory.router.setting_values import setting as _setting

# What only the endpoint picker for Envoy has to be told: the section ``[picker]`` of a router's settings.


@dataclass(frozen=True, slots=True)
class PickerSettings:
    """`skymemory epp`, beside what it has in common with `skymemory route`."""

    listen: str = setting("listen", text, "127.0.0.1:9002", "where Envoy asks (gRPC); port 0: any that is free")
    health_listen: str = setting("health_listen", text, "", "gRPC health without TLS too, for probes that have none")
    metrics_listen: str = setting("metrics_listen", text, "", "HTTP /metrics for Prometheus; empty: none")
    endpoints: Path | None = setting(  # noqa: RUF009 - a frozen value, one for all
        "endpoints", path, None, "a file of endpoints instead of [[backends]], one a line; read again when it changes"
    )
    discover: str = setting("discover", text, "", "NAME:PORT instead: every address of a DNS name is an endpoint")
    refresh_s: float = setting("refresh", duration, 5.0, "between two looks at those")
    events_port: int = setting("events_port", whole, 0, "of endpoints that say no `events` of their own; 0: none")
    replay_port: int = setting("replay_port", whole, 0, "likewise, where lost events are asked for again")
    model: str = setting("model", text, "", "that endpoints serve, where `models` does not say; events need it")
    fallbacks: int = setting("fallbacks", whole, 0, "further endpoints to name, best first")
    max_requests: int = setting("max_requests", whole, 0, "at one server; where all have as many: 429. 0: any number")
    max_streams: int = setting("max_streams", whole, 10_000, "requests at once in this picker; more: 429")
    tell_decisions: bool = setting(
        "tell_decisions", yes_or_no, False, "answer clients that send x-skymemory-decision with the reasons"
    )
    self_signed: bool = setting("self_signed", yes_or_no, False, "TLS with a certificate made at the start")
    tls_cert: Path | None = setting("tls_cert", path, None, "certificate chain (PEM)")  # noqa: RUF009
    tls_key: Path | None = setting("tls_key", path, None, "its key (PEM)")  # noqa: RUF009
    tls_client_ca: Path | None = setting(  # noqa: RUF009
        "tls_client_ca", path, None, "only clients that this authority signed (PEM)"
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
            raise InvalidInput("name endpoints in one way: `endpoints` or `discover`")
        if max(self.events_port, self.replay_port) > 65_535:
            raise InvalidInput("events_port, replay_port: ports go to 65535")
        if self.self_signed and (self.tls_cert or self.tls_key):
            raise InvalidInput("self_signed makes a certificate; tls_cert and tls_key give one: choose")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise InvalidInput("tls_cert and tls_key go together")
        if self.tls_client_ca and not self.tls_cert:
            raise InvalidInput("tls_client_ca needs tls_cert and tls_key")


@dataclass(frozen=True, slots=True)
class Backend:
    """A server behind the router."""

    url: str = _setting("url", address, "", "where it listens, as http://host:port")
    name: str = _setting("name", text, "", "what it is called in metrics and decisions; its host:port if not said")
    models: tuple[str, ...] = _setting("models", texts, (), "models it serves; asked of it (/v1/models) if not said")
    adapters: tuple[str, ...] = _setting("adapters", texts, (), "LoRA adapters it can serve, in addition")
    events: str = _setting("events", text, "", "where it publishes KV events, as tcp://host:5557; empty: it does not")
    replay: str = _setting("replay", text, "", "where it hands out events again, as tcp://host:5558; empty: nowhere")
    topic: str = _setting("topic", text, "", "what the topics of its events begin with; empty: all of them")
    drain: bool = _setting("drain", yes_or_no, False, "it finishes what it has and gets nothing new")
    ca: Path | None = _setting(  # noqa: RUF009 - a frozen value, one for all
        "ca", path, None, "certificates (PEM) that an https server's is checked against; the system's if not said"
    )
    api_key_file: Path | None = _setting(  # noqa: RUF009 - a frozen value, one for all
        "api_key_file",
        path,
        None,
        "a file with the key that the server wants; clients' keys are not shown to it then",
    )

    def __post_init__(self) -> None:
        if not self.url:
            raise InvalidInput("a backend needs its `url`, such as http://127.0.0.1:8001")
        if self.ca is not None and not self.url.startswith("https:"):
            raise InvalidInput(f"`ca` is for servers asked over TLS, and {self.url} is not: https://…")
        if not self.name:
            object.__setattr__(self, "name", urlsplit(self.url).netloc)


@dataclass(frozen=True, slots=True)
class Prompts:
    """What a block of a prompt is, and what tells clients apart."""

    tokenizer: Path | None = _setting(  # noqa: RUF009 - a frozen value, one for all
        "tokenizer", path, None, "a tokenizer.json, or a folder with one: blocks are tokens then, not characters"
    )
    block_tokens: int = _setting(
        "block_tokens", whole, 16, "tokens of a block, as the engine has it (with a tokenizer)"
    )
    block_bytes: int = _setting("block_bytes", whole, 64, "bytes of text of a block (without)")
    max_blocks: int = _setting(
        "max_blocks", whole, 8192, "blocks of a prompt that are hashed; what follows steers nothing"
    )
    session_header: str = _setting("session_header", text, "x-session-id", "the header that names a session")
    session_cookie: str = _setting(
        "session_cookie", text, "session", "the cookie that does where the header is not sent"
    )


@dataclass(frozen=True, slots=True)
class Limits:
    """What is too much."""

    max_body_bytes: int = _setting("max_body", size, 16 << 20, "a larger body is refused: 413")
    max_in_flight: int = _setting("max_in_flight", whole, 4096, "requests at once; more are refused: 429")
    max_waiting: int = _setting(
        "max_waiting",
        whole,
        0,
        "requests at one server that wait for their first byte; where all have as many: 429. 0: any",
    )


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long is waited, for whom."""

    connect_s: float = _setting("connect", duration, 2.0, "for a server to take a connection")
    first_byte_s: float = _setting("first_byte", duration, 600.0, "for the first byte of an answer")
    idle_s: float = _setting("idle", duration, 120.0, "between two pieces of an answer")
    client_s: float = _setting("client", duration, 60.0, "for a client to send its body, or to take what it is sent")
    keep_alive_s: float = _setting(
        "keep_alive", duration, 75.0, "before a connection on which nothing is asked is closed"
    )


@dataclass(frozen=True, slots=True)
class Door:
    """`skymemory route` to its clients: TLS, and who may come in."""

    tls_cert: Path | None = _setting("tls_cert", path, None, "certificate chain (PEM): HTTPS")  # noqa: RUF009
    tls_key: Path | None = _setting("tls_key", path, None, "its key (PEM)")  # noqa: RUF009
    api_keys: Path | None = _setting(  # noqa: RUF009 - a frozen value, one for all
        "api_keys", path, None, "a file of API keys, tenants and quotas (`skymemory keys api`); without one all may ask"
    )

    def __post_init__(self) -> None:
        if bool(self.tls_cert) != bool(self.tls_key):
            raise InvalidInput("tls_cert and tls_key go together")


@dataclass(frozen=True, slots=True)
class Health:
    """How servers are watched."""

    path: str = _setting("path", text, "/health", "what is asked for: any answer from 200 to 299 is health")
    every_s: float = _setting("every", duration, 2.0, "between two checks of a server")
    timeout_s: float = _setting("timeout", duration, 2.0, "for an answer")
    failures: int = _setting("failures", whole, 3, "in a row, of checks or connections, that eject a server")
    successes: int = _setting("successes", whole, 2, "checks in a row that bring it back")
    metrics_path: str = _setting("metrics_path", text, "/metrics", "where an engine tells its load; empty: not asked")
    metrics_every_s: float = _setting("metrics_every", duration, 1.0, "between two looks at it")
    models_every_s: float = _setting("models_every", duration, 30.0, "between two looks at its models and adapters")


@dataclass(frozen=True, slots=True)
class Retries:
    """What is tried again elsewhere. Never once a byte of the answer has come."""

    most: int = _setting("most", whole, 2, "further servers that are tried")
    statuses: tuple[int, ...] = _setting(
        "statuses", wholes, (502, 503, 504), "answers that are not taken from the first"
    )


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """Other routers before the same servers, with which what is learnt is shared through Redis."""

    redis: str = _setting("redis", text, "", "a Redis that all replicas reach, as redis://host:6379/0")
    keys: Path | None = _setting(  # noqa: RUF009 - a frozen value, one for all
        "keys", path, None, "a file of keys (`skymemory keys new`) that all have; entries without their MAC are refused"
    )


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """Who is let in when there is more to do than can be done in time."""

    rule: str = _setting("rule", text, "all", "who is let in: all, baseline, early, predicted, goodput")
    ttft_s: float = _setting("ttft", duration, 0.0, "what is promised to the first token; every rule but all needs it")
    tbt_s: float = _setting("tbt", duration, 0.0, "what is promised between tokens; measured and counted. 0: nothing")
    fair: bool = _setting("fair", yes_or_no, False, "priorities and fair shares of tenants, before the rule")
    tenant_header: str = _setting(
        "tenant_header", text, "", "the header that names a tenant; else its API key does, else `user` of the body"
    )
    priority_header: str = _setting(
        "priority_header", text, "x-skymemory-priority", "the header that says how urgent it is; empty: nothing does"
    )
    objectives: Mapping[str, int] = field(
        default_factory=dict,
        metadata={
            "key": "objectives",
            "read": whole_by_name,
            "says": "priorities of the Gateway API's InferenceObjectives by their names; higher goes first",
        },
    )
    options: Mapping[str, object] = field(
        default_factory=dict,
        metadata={"key": "options", "read": table, "says": "of the rule and of fairness, by their names"},
    )


@dataclass(frozen=True, slots=True)
class Settings:
    """A router."""

    backends: tuple[Backend, ...] = ()
    prompts: Prompts = Prompts()
    limits: Limits = Limits()
    timeouts: Timeouts = Timeouts()
    health: Health = Health()
    retries: Retries = Retries()
    replicas: ReplicaSettings = ReplicaSettings()
    admission: AdmissionSettings = AdmissionSettings()
    door: Door = Door()
    cors: CorsSettings = CorsSettings()  # noqa: RUF009 - likewise
    queue: QueueSettings = QueueSettings()  # noqa: RUF009 - a frozen value, one for all
    picker: PickerSettings = PickerSettings()
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the strategy."""
    listen: str = _setting("listen", text, "127.0.0.1:8080", "address and port; port 0: any that is free")
    strategy: str | None = _setting("strategy", text, None, "how servers are chosen")
    seed: int = _setting("seed", whole, 0, "of what breaks ties")
    drain_s: float = _setting("drain", duration, 30.0, "for requests to end, when the router is told to stop")
    log_requests: bool = _setting("log_requests", yes_or_no, False, "one line per request")
    state: Path | None = _setting("state", path, None, "where what was learnt is kept over a restart")  # noqa: RUF009
    cost: Path | None = _setting(  # noqa: RUF009
        "cost",
        path,
        None,
        "a file of `skymemory fit`, or a preset's name: what prefills take, in place of learning it (least-ttft)",
    )

    def __post_init__(self) -> None:
        host_and_port(self.listen)
        names = [backend.name for backend in self.backends]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise InvalidInput(f"two backends are called {twice[0]!r}: names must differ")
        if self.prompts.block_bytes < 1 or self.prompts.block_tokens < 1 or self.prompts.max_blocks < 1:
            raise InvalidInput("blocks must have at least a byte or a token, and prompts a block")
        if self.health.every_s <= 0 or self.health.failures < 1 or self.health.successes < 1:
            raise InvalidInput("health checks: `every` must be above 0, `failures` and `successes` at least 1")
        if self.queue.most_requests and not (self.limits.max_waiting or self.picker.max_requests):
            raise InvalidInput(
                "queue: requests wait until a server has room, so say how many make one full: "
                "limits: max_waiting (route), picker: max_requests (epp)"
            )
        if self.limits.max_in_flight < 1 or self.limits.max_body_bytes < 1:
            raise InvalidInput("limits: `max_in_flight` and `max_body` must be above 0")


# Settings from a TOML file and from flags, by the schema in `settings`; a key that it does not know is an error.


SECTIONS: Mapping[str, type[Any]] = {
    "prompts": Prompts,
    "limits": Limits,
    "timeouts": Timeouts,
    "health": Health,
    "retries": Retries,
    "replicas": ReplicaSettings,
    "admission": AdmissionSettings,
    "queue": QueueSettings,
    "door": Door,
    "cors": CorsSettings,
    "picker": PickerSettings,
}
_SHARE_THROUGH_REDIS = "routers share through Redis now: redis = 'redis://HOST:6379/0'"
_REMOVED: Mapping[tuple[type[Any], str], str] = {
    (ReplicaSettings, "listen"): _SHARE_THROUGH_REDIS,
    (ReplicaSettings, "peers"): _SHARE_THROUGH_REDIS,
}
"""Keys that there were, and what to write instead."""
T = TypeVar("T")


def read_settings(file: Path | None, flags: Mapping[str, Any] | None = None) -> Settings:
    """What stands in ``file``, and over it what ``flags`` say (a table of the same form).

    Raises:
        InvalidInput: it cannot be read, has a key that we do not know, or a value that is none.
    """
    table: dict[str, Any] = {} if file is None else _toml(file)
    where = "the flags" if file is None else str(file)
    try:
        return settings_from(_over(table, flags or {}))
    except InvalidInput as error:
        raise InvalidInput(f"{where}: {error}") from error


def settings_from(table: Mapping[str, Any]) -> Settings:
    sections = {name: filled(kind, _table(table.get(name, {}), name), name) for name, kind in SECTIONS.items()}
    options = _table(table.get("options", {}), "options")
    backends = table.get("backends", [])
    if not isinstance(backends, list):
        raise InvalidInput("backends: expected [[backends]] tables, one for each")
    read = [filled(Backend, _backend(each), f"backends, number {at}") for at, each in enumerate(backends, 1)]
    own = {key: value for key, value in table.items() if key not in {*SECTIONS, "options", "backends"}}
    return filled(Settings, own, "", backends=tuple(read), options=dict(options), **sections)


def known_keys(kind: type[Any]) -> dict[str, dataclasses.Field[Any]]:
    """Fields of a part of the schema by the keys under which they are written."""
    return {field.metadata["key"]: field for field in dataclasses.fields(kind) if "key" in field.metadata}


def filled(kind: type[T], table: Mapping[str, Any], where: str, **more: Any) -> T:
    """A part of a schema out of a table; ``where`` it stands begins the sentence of an error.

    Raises:
        InvalidInput: a key that it does not have, with the nearest that it has, or a value that is none.
    """
    fields = known_keys(kind)
    values = dict(more)
    for key, value in table.items():
        place = f"{where}: {key}" if where else key
        if (kind, key) in _REMOVED:
            raise InvalidInput(f"{place}: this setting was removed; {_REMOVED[kind, key]}")
        if key not in fields:
            sections = [*SECTIONS, "options", "backends"] if kind is Settings else []
            raise InvalidInput(f"{place}: unknown setting; {suggestion(key, [*fields, *sections])}")
        try:
            values[fields[key].name] = fields[key].metadata["read"](value)
        except InvalidInput as error:
            raise InvalidInput(f"{place}: {error}") from error
    try:
        return kind(**values)
    except InvalidInput as error:
        raise InvalidInput(f"{where}: {error}" if where else str(error)) from error


def _table(value: object, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidInput(f"{name}: expected a table, [{name}]")
    return value


def _backend(value: object) -> Mapping[str, Any]:
    """A table, or only its address."""
    return {"url": value} if isinstance(value, str) else _table(value, "backends")


def _toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_bounded(file).decode("utf-8"))
    except OSError as error:
        raise InvalidInput(f"{str(file)!r} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{str(file)!r} is not TOML: {error}") from error


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Tables are joined, all else is replaced by what is said above."""
    joined = dict(below)
    for key, value in above.items():
        old = joined.get(key)
        joined[key] = _over(old, value) if isinstance(value, Mapping) and isinstance(old, Mapping) else value
    return joined


# Files that are followed while a router runs: its settings, and what they name.


LOOK_S = 1.0
"""Between two looks at the files."""


async def follow(files: Callable[[], Iterable[Path]], changed: Callable[[], None]) -> None:
    """Call ``changed`` whenever one of ``files`` is another than it was.

    Which those are is asked at each look: one that the settings have come to name was read along with them.
    """
    seen = {file: look(file) for file in files()}
    while True:
        await asyncio.sleep(LOOK_S)
        now = {file: look(file) for file in files()}
        is_other = any(found is not None and file in seen and found != seen[file] for file, found in now.items())
        seen = {file: seen.get(file) if found is None else found for file, found in now.items()}
        if is_other:
            changed()


def look(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None  # while it is being replaced
    return found.st_mtime_ns, found.st_size, found.st_ino


# A cost model by name, or from a file, such as ``skymemory fit`` writes.


def read_cost(file: Path) -> CostModel:
    """The cost model in ``file``: JSON or TOML; or the preset of that name, where there is no such file.

    Raises:
        InvalidInput: it cannot be read, or is none.
    """
    if str(file) in PRESETS and not file.exists():
        return PRESETS[str(file)]
    try:
        return parse(read_bounded(file).decode("utf-8"))
    except (OSError, UnicodeDecodeError, InvalidInput) as error:
        words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        named = f"; or one of {', '.join(PRESETS)}" if isinstance(error, FileNotFoundError) else ""
        raise InvalidInput(f"cost model {file}: {words}{named}") from error
