"""``skymemory epp``: an endpoint picker for Envoy and gateways built on it."""

from __future__ import annotations

import argparse
import gc
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skymemory.cli._options import duration, option, size, without_unset
from skymemory.errors import InvalidInput, SkyMemoryError

if TYPE_CHECKING:
    from skymemory.cli.main import Subparsers
    from skymemory.router.envoy.server import EndpointPicker
    from skymemory.router.settings import Settings


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "epp",
        help="pick endpoints for Envoy (Gateway API inference extension)",
        description="Serve Envoy's external processing protocol and choose the model server of each request, as the "
        "Gateway API inference extension specifies. Runs until Ctrl-C. To try it: start it with "
        "--envoy-config envoy.json, then run `envoy -c envoy.json`.",
        epilog="All settings: docs/reference/router.md",
    )
    parser.add_argument(
        "--settings",
        type=Path,
        metavar="FILE",
        help="settings in TOML, as for `route`; reloaded on change and on SIGHUP",
    )
    servers = parser.add_argument_group("model servers (one of the three ways)")
    servers.add_argument("--endpoint", action="append", metavar="IP:PORT", help="a model server; may be repeated")
    servers.add_argument("--endpoints", metavar="FILE", help="file with one IP:PORT per line; reloaded on change")
    servers.add_argument(
        "--discover", metavar="NAME:PORT", help="all addresses of a DNS name, such as a headless Service of Kubernetes"
    )
    servers.add_argument(
        "--refresh", type=duration, metavar="TIME", help="interval of --endpoints and --discover (default: 5s)"
    )
    servers.add_argument(
        "--metrics-path", metavar="PATH", help="path of their metrics (default: /metrics; empty: not scraped)"
    )
    picking = parser.add_argument_group("picking")
    picking.add_argument("--strategy", metavar="NAME", help="routing strategy (default: the router's)")
    picking.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="option of the strategy; may be repeated"
    )
    picking.add_argument(
        "--fallbacks",
        type=int,
        metavar="N",
        help="number of fallback endpoints per answer, best first (default: 0)",
    )
    picking.add_argument("--tokenizer", metavar="PATH", help="the model's tokenizer; blocks are then counted in tokens")
    picking.add_argument(
        "--block-tokens", type=int, metavar="N", help="tokens per block, with --tokenizer (default: 16)"
    )
    picking.add_argument("--seed", type=int, metavar="N", help="seed of tie breaks (default: 0)")
    picking.add_argument(
        "--kv-events", type=int, metavar="PORT", help="port of every endpoint's KV events (ZMQ), for --strategy precise"
    )
    picking.add_argument("--kv-replay", type=int, metavar="PORT", help="port where lost KV events are requested again")
    picking.add_argument(
        "--model", metavar="NAME", help="the model that the endpoints serve, as requests name it (with --kv-events)"
    )
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--max-requests", type=int, metavar="N", help="requests per server; 429 where all are full (default: no limit)"
    )
    limits.add_argument("--max-streams", type=int, metavar="N", help="streams in total; 429 above (default: 10000)")
    limits.add_argument("--max-body", type=size, metavar="SIZE", help="largest body; 413 above (default: 16MiB)")
    limits.add_argument(
        "--tell-decisions",
        action="store_true",
        default=None,
        help="explain the choice to clients that send x-skymemory-decision",
    )
    known = parser.add_argument_group("state")
    known.add_argument("--state", metavar="FILE", help="file that keeps the prefix index and estimates over a restart")
    known.add_argument(
        "--replicas",
        metavar="URL",
        help="share state with other pickers through Redis or Valkey: redis://HOST:PORT/DB",
    )
    known.add_argument("--replica-keys", metavar="FILE", help="key file that all pickers share (`skymemory keys new`)")
    doors = parser.add_argument_group("addresses")
    doors.add_argument("--listen", metavar="IP:PORT", help="gRPC address (default: 127.0.0.1:9002; port 0: any free)")
    doors.add_argument(
        "--health-listen", metavar="IP:PORT", help="a second gRPC health address without TLS, for probes"
    )
    doors.add_argument("--metrics-listen", metavar="IP:PORT", help="HTTP address of /metrics for Prometheus")
    doors.add_argument(
        "--grace", type=duration, metavar="TIME", help="time for requests to finish on SIGTERM (default: 30s)"
    )
    tls = parser.add_argument_group("TLS")
    tls.add_argument(
        "--self-signed",
        action="store_true",
        default=None,
        help="use a certificate made at the start, which gateways accept",
    )
    tls.add_argument("--tls-cert", metavar="FILE", help="certificate chain (PEM)")
    tls.add_argument("--tls-key", metavar="FILE", help="key of the certificate (PEM)")
    tls.add_argument("--tls-client-ca", metavar="FILE", help="accept only clients signed by this authority (PEM)")
    envoy = parser.add_argument_group("Envoy, to try it")
    envoy.add_argument(
        "--envoy-config", type=Path, metavar="FILE", help="write an Envoy configuration that uses this picker"
    )
    envoy.add_argument(
        "--envoy-listen",
        default="127.0.0.1:8080",
        metavar="IP:PORT",
        help="address for clients in it (default: 127.0.0.1:8080)",
    )


def run(args: argparse.Namespace) -> int:
    import asyncio
    import logging
    import sys

    from skymemory.router.envoy.server import serve
    from skymemory.router.settings import read_settings
    from skymemory.testbed.key_file import read_keys

    flags = _flags(args)
    settings = read_settings(args.settings, flags)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")

    def started(picker: EndpointPicker) -> None:
        at_start = settings.picker
        host = at_start.listen.rpartition(":")[0]
        at = f"{host}:{picker.server.port}"
        over_tls = at_start.self_signed or at_start.tls_cert is not None
        _print(f"picks at {at}{' over TLS' if over_tls else ''}")
        if at_start.health_listen:
            _print(f"health at {at_start.health_listen.rpartition(':')[0]}:{picker.server.health_port}")
        if picker.metrics is not None:
            host = at_start.metrics_listen.rpartition(":")[0]
            _print(f"metrics at http://{host}:{picker.metrics.port}/metrics")
        if args.envoy_config is not None:
            _write_envoy_config(args, at, settings)

    loop_factory = None
    try:
        import uvloop

        loop_factory = uvloop.new_event_loop
    except ImportError:
        pass
    # Without the objects of the start-up in collections, and with rarer ones, a request takes 6 % less time.
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(serve(lambda: read_settings(args.settings, flags), args.settings, _print, read_keys, started))
    return 0


def _flags(args: argparse.Namespace) -> dict[str, Any]:
    """The flags as a table of settings."""
    table: dict[str, Any] = {
        "strategy": args.strategy,
        "seed": args.seed,
        "drain": args.grace,
        "state": args.state,
        "backends": [{"url": f"http://{parse_as_endpoint(each)}"} for each in args.endpoint or ()] or None,
        "options": dict(option(text) for text in args.option) or None,
        "prompts": {"tokenizer": args.tokenizer, "block_tokens": args.block_tokens},
        "limits": {"max_body": args.max_body},
        "health": {"metrics_path": args.metrics_path},
        "replicas": {"redis": _replicas(args.replicas), "keys": args.replica_keys},
        "picker": {
            "listen": args.listen,
            "health_listen": args.health_listen,
            "metrics_listen": args.metrics_listen,
            "endpoints": args.endpoints,
            "discover": args.discover,
            "refresh": args.refresh,
            "events_port": args.kv_events,
            "replay_port": args.kv_replay,
            "model": args.model,
            "fallbacks": args.fallbacks,
            "max_requests": args.max_requests,
            "max_streams": args.max_streams,
            "tell_decisions": args.tell_decisions,
            "self_signed": args.self_signed,
            "tls_cert": args.tls_cert,
            "tls_key": args.tls_key,
            "tls_client_ca": args.tls_client_ca,
        },
    }
    return without_unset(table)


def parse_as_endpoint(text: str) -> str:
    from skymemory.router.envoy.endpoints import parse_endpoint

    return parse_endpoint(text)


def _replicas(text: str | None) -> str | None:
    if text is None:
        return None
    kind, _, rest = text.partition("://")
    if kind == "gossip":
        raise InvalidInput(f"--replicas {text!r}: gossip was removed; expected redis://HOST:PORT/DB")
    if kind not in ("redis", "rediss", "unix") or not rest:
        raise InvalidInput(f"--replicas {text!r}: expected redis://HOST:PORT/DB")
    return text


def _write_envoy_config(args: argparse.Namespace, at: str, settings: Settings) -> None:
    from skymemory.router.envoy.config import Entrance, bootstrap
    from skymemory.router.envoy.endpoints import as_endpoint

    host, _, port = at.rpartition(":")
    everywhere = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
    entrance = Entrance(
        "inference",
        f"{everywhere.get(host, host)}:{port}",
        listen=_address(args.envoy_listen, "--envoy-listen"),
        endpoints=tuple(as_endpoint(each).name for each in settings.backends),
        retries=settings.picker.fallbacks,
        picker_tls=settings.picker.self_signed or settings.picker.tls_cert is not None,
    )
    try:
        args.envoy_config.write_text(json.dumps(bootstrap([entrance]), indent=1) + "\n", "utf-8")
    except OSError as error:
        raise SkyMemoryError(f"--envoy-config {args.envoy_config}: {error.strerror}") from error
    _print(f"wrote Envoy's configuration; run: envoy -c {args.envoy_config}")


def _address(text: str, option: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise InvalidInput(f"{option} {text!r}: expected IP:PORT, as 127.0.0.1:8080")
    return text


def _print(line: str) -> None:
    print(line, flush=True)
