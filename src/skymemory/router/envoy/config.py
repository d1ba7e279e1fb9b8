"""Bootstrap configuration of an Envoy outside Kubernetes with an endpoint picker. Checked against Envoy 1.40."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from skymemory.router.envoy.messages import (
    CODE_DETAILS,
    DESTINATION,
    METADATA_NAMESPACE,
    READINESS,
    SERVED,
    SUBSET_NAMESPACE,
    UPSTREAM_ADDRESS,
)
from skymemory.router.failure.budget import FIRST_S, MOST_S
from skymemory.router.failure.evidence import EJECTING, REST_S
from skymemory.router.settings import RETRIABLE

_TYPE = "type.googleapis.com/envoy"
BUFFER_BYTES = 16 << 20
"""Bytes kept of a request for a retry; longer requests are not retried."""
MANY = 1_000_000


@dataclass(frozen=True, slots=True)
class Entrance:
    """Envoy listener to configure, with its picker and endpoints."""

    name: str
    picker: str | None  # address (`ip:port`); None: no picker, for comparison
    listen: str = "127.0.0.1:0"
    # All endpoints, required for fallbacks, `fail_open` and no picker. If empty, Envoy uses the picker's addresses
    # (ORIGINAL_DST).
    endpoints: tuple[str, ...] = ()
    # Source of the endpoint. A client can send the header, but no metadata.
    read_from: Literal["metadata", "header"] = "metadata"
    retries: int = 0  # further endpoints after connection failures, resets and `RETRIABLE` statuses
    retry_budget: float = 0.2  # concurrent retries as a share of the active requests
    retry_floor: int = 3  # concurrent retries that are always allowed
    max_ejected: float = 0.5  # share of the endpoints
    fail_open: bool = False  # use `endpoints` in turn while the picker is down, instead of errors
    picker_tls: bool = False  # the picker has TLS
    picker_ca: str | None = None  # authority of its certificate; None: any certificate
    # Period of health checks of the picker. After two failures Envoy goes on without it: with full-duplex bodies no
    # other timeout ends a waiting request.
    health_s: float = 1.0
    upload_s: float = 120.0
    filters_before: tuple[dict[str, Any], ...] = field(default=())


def bootstrap(entrances: Sequence[Entrance]) -> dict[str, Any]:
    """Return the configuration, with an admin page on a free port of 127.0.0.1."""
    clusters = [_servers(entrance) for entrance in entrances]
    clusters += [_picker(entrance) for entrance in entrances if entrance.picker is not None]
    return {
        "admin": {"address": _address("127.0.0.1:0")},
        "static_resources": {"listeners": [_listener(entrance) for entrance in entrances], "clusters": clusters},
    }


def _listener(entrance: Entrance) -> dict[str, Any]:
    route: dict[str, Any] = {"cluster": f"{entrance.name}-servers", "timeout": "0s"}
    if entrance.retries:
        route["retry_policy"] = {
            "retry_on": "connect-failure,refused-stream,reset,retriable-status-codes",
            "retriable_status_codes": list(RETRIABLE),
            "num_retries": entrance.retries,
            "retry_back_off": {"base_interval": f"{FIRST_S:g}s", "max_interval": f"{MOST_S:g}s"},
        }
    router = {
        "name": "envoy.filters.http.router",
        "typed_config": {"@type": f"{_TYPE}.extensions.filters.http.router.v3.Router"},
    }
    manager = {
        "@type": f"{_TYPE}.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": entrance.name,
        "generate_request_id": False,
        "stream_idle_timeout": "3600s",
        "request_headers_timeout": "10s",
        "request_timeout": f"{entrance.upload_s:g}s",
        "route_config": {
            "virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [{"match": {"prefix": "/"}, "route": route}]}]
        },
        "http_filters": [*entrance.filters_before, *_asking(entrance), router],
    }
    return {
        "name": entrance.name,
        "address": _address(entrance.listen),
        "per_connection_buffer_limit_bytes": BUFFER_BYTES,
        "filter_chains": [
            {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
        ],
    }


def _asking(entrance: Entrance) -> list[dict[str, Any]]:
    """Return the filter that asks the picker."""
    if entrance.picker is None:
        return []
    config = {
        "@type": f"{_TYPE}.extensions.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": f"{entrance.name}-picker"}},
        "failure_mode_allow": entrance.fail_open,
        "processing_mode": {
            "request_header_mode": "SEND",
            "request_body_mode": "FULL_DUPLEX_STREAMED",
            "request_trailer_mode": "SEND",
            "response_header_mode": "SEND",
            "response_body_mode": "FULL_DUPLEX_STREAMED",
            "response_trailer_mode": "SEND",
        },
        "response_attributes": [UPSTREAM_ADDRESS, CODE_DETAILS],
        "metadata_options": {
            "forwarding_namespaces": {"untyped": [METADATA_NAMESPACE, SUBSET_NAMESPACE]},
            "receiving_namespaces": {"untyped": [METADATA_NAMESPACE]},
        },
    }
    return [{"name": "envoy.filters.http.ext_proc", "typed_config": config}]


def _servers(entrance: Entrance) -> dict[str, Any]:
    """Return the cluster of endpoints, which reads the picker's choice from metadata or a header."""
    cluster: dict[str, Any] = {
        "name": f"{entrance.name}-servers",
        "connect_timeout": "1s",
        "per_connection_buffer_limit_bytes": BUFFER_BYTES,
        "circuit_breakers": _no_limits(_retry_budget(entrance)),
    }
    if not entrance.endpoints:
        destination: dict[str, Any] = (
            {"metadata_key": _metadata_key(DESTINATION)}
            if entrance.read_from == "metadata"
            else {"use_http_header": True, "http_header_name": DESTINATION}
        )
        lb = {"lb_policy": "CLUSTER_PROVIDED", "original_dst_lb_config": destination}
        return {**cluster, "type": "ORIGINAL_DST", **lb}
    cluster |= {
        "type": "STATIC",
        "load_assignment": _assignment(cluster["name"], entrance.endpoints),
        "outlier_detection": _outliers(entrance),
    }
    in_turn = {
        "name": "envoy.load_balancing_policies.round_robin",
        "typed_config": {"@type": f"{_TYPE}.extensions.load_balancing_policies.round_robin.v3.RoundRobin"},
    }
    policy: dict[str, Any] = {"policies": [{"typed_extension_config": in_turn}]}
    if entrance.picker is not None:
        source = (
            {"metadata": _metadata_key(DESTINATION)} if entrance.read_from == "metadata" else {"header": DESTINATION}
        )
        chosen = {
            "@type": f"{_TYPE}.extensions.load_balancing_policies.override_host.v3.OverrideHost",
            "override_host_sources": [source],
            "selected_host_key": _metadata_key(SERVED),
            "fallback_policy": policy,
        }
        override = {"name": "envoy.load_balancing_policies.override_host", "typed_config": chosen}
        policy = {"policies": [{"typed_extension_config": override}]}
    return {**cluster, "load_balancing_policy": policy}


def _picker(entrance: Entrance) -> dict[str, Any]:
    name = f"{entrance.name}-picker"
    period = f"{entrance.health_s:g}s"
    # A picker that hangs keeps its connections. Pings detect that, and end the streams that wait for it.
    pings = {"connection_keepalive": {"interval": period, "timeout": period}}
    options = {
        "@type": f"{_TYPE}.extensions.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": pings},
    }
    check = {
        "timeout": period,
        "interval": period,
        "no_traffic_interval": period,
        "unhealthy_threshold": 2,
        "healthy_threshold": 1,
        "grpc_health_check": {"service_name": READINESS},
    }
    cluster: dict[str, Any] = {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_assignment": _assignment(name, (str(entrance.picker),)),
        "health_checks": [check],
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
        "circuit_breakers": _no_limits(),
        "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": options},
    }
    if entrance.picker_tls:
        trust = (
            {}
            if entrance.picker_ca is None
            else {"validation_context": {"trusted_ca": {"filename": entrance.picker_ca}}}
        )
        context = {
            "@type": f"{_TYPE}.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
            "common_tls_context": {"alpn_protocols": ["h2"], **trust},
        }
        cluster["transport_socket"] = {"name": "envoy.transport_sockets.tls", "typed_config": context}
    return cluster


def _no_limits(more: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Lift Envoy's limits (1,024 requests), which would refuse long streams."""
    return {"thresholds": [{"max_connections": MANY, "max_pending_requests": MANY, "max_requests": MANY, **more}]}


def _retry_budget(entrance: Entrance) -> dict[str, Any]:
    share = {"value": 100.0 * entrance.retry_budget}
    return {"retry_budget": {"budget_percent": share, "min_retry_concurrency": entrance.retry_floor}}


def _outliers(entrance: Entrance) -> dict[str, Any]:
    """Return passive health checks, similar to ``failure``, but Envoy always blames the server."""
    return {
        "interval": "1s",
        "base_ejection_time": f"{REST_S[1]:g}s",  # times the number of ejections
        "max_ejection_time": f"{REST_S[-1]:g}s",
        "max_ejection_percent": round(100 * entrance.max_ejected),
        "consecutive_5xx": EJECTING,
        "split_external_local_origin_errors": True,  # counts connection failures and resets separately from statuses
        "consecutive_local_origin_failure": EJECTING,
    }


def _metadata_key(key: str) -> dict[str, Any]:
    return {"key": METADATA_NAMESPACE, "path": [{"key": key}]}


def _assignment(cluster: str, endpoints: Sequence[str]) -> dict[str, Any]:
    hosts = [{"endpoint": {"address": _address(endpoint)}} for endpoint in endpoints]
    return {"cluster_name": cluster, "endpoints": [{"lb_endpoints": hosts}]}


def _address(text: str) -> dict[str, Any]:
    host, _, port = text.rpartition(":")
    return {"socket_address": {"address": host.strip("[]"), "port_value": int(port)}}
