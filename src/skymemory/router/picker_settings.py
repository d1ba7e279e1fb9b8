"""What only the endpoint picker for Envoy has to be told: the section ``[picker]`` of a router's settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from skymemory.errors import InvalidInput
from skymemory.router.setting_values import duration, host_and_port, path, setting, text, whole, yes_or_no


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
        for address in (self.listen, self.health_listen, self.metrics_listen):
            if address:
                host_and_port(address)
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
