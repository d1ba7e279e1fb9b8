"""How a router is set up: one schema, for the file, for the flags, and for the page that documents it.

Every field says by which key it is written, and how what is written there is read; `settings_file` does the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from skymemory.errors import InvalidInput
from skymemory.router.picker_settings import PickerSettings
from skymemory.router.setting_values import (
    address,
    duration,
    host_and_port,
    path,
    size,
    table,
    text,
    texts,
    whole,
    wholes,
    yes_or_no,
)
from skymemory.router.setting_values import setting as _setting


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
    """Other routers before the same servers, with which what is learnt is shared: through Redis, or by gossip."""

    redis: str = _setting("redis", text, "", "a Redis that all replicas reach, as redis://host:6379/0")
    listen: str = _setting("listen", text, "", "where other replicas are awaited, as 127.0.0.1:7400 (gossip)")
    peers: tuple[str, ...] = _setting("peers", texts, (), "where they are, as host:port (gossip)")
    keys: Path | None = _setting(  # noqa: RUF009 - a frozen value, one for all
        "keys", path, None, "a file of keys (`skymemory keys new`) that all have; gossip beyond this computer needs it"
    )

    def __post_init__(self) -> None:
        if self.redis and (self.listen or self.peers):
            raise InvalidInput("replicas share through Redis or by gossip, not both")


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
    picker: PickerSettings = PickerSettings()  # noqa: RUF009 - a frozen value, one for all
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
        if self.limits.max_in_flight < 1 or self.limits.max_body_bytes < 1:
            raise InvalidInput("limits: `max_in_flight` and `max_body` must be above 0")
