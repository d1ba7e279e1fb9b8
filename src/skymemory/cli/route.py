"""The router's front ends: ``skymemory route``, an OpenAI-compatible proxy, and ``skymemory epp``, Envoy's endpoint
picker.

Flags become a table of settings that overrides the file's.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skymemory.addresses import format_address, host_and_port
from skymemory.cli._options import check_router_installed, duration, size
from skymemory.errors import InvalidInput, SkyMemoryError
from skymemory.text import write_line
from skymemory.units import parse_whole

if TYPE_CHECKING:
    from skymemory.cli.main import Subparsers
    from skymemory.keys import KeyRing
    from skymemory.router.envoy.server import EndpointPicker
    from skymemory.router.http.check import ServerCheck
    from skymemory.router.settings import Settings


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "route",
        help="run an OpenAI-compatible proxy that routes by prompt prefix",
        description="Serve OpenAI's API in front of engines (vLLM, SGLang, ...) and send each request to the one with "
        "the shortest estimated time to the first token, given its cache and its queue. Runs until Ctrl-C.",
        epilog="All settings: docs/reference/router.md",
    )
    add = parser.add_argument
    add(
        "--backend",
        action="append",
        default=[],
        metavar="URL",
        help="an engine, such as http://host:port; may be repeated",
    )
    add(
        "--prefill",
        action="append",
        default=[],
        metavar="URL",
        help="an engine that only prefills; others answer (--decode); may be repeated",
    )
    add(
        "--decode",
        action="append",
        default=[],
        metavar="URL",
        help="an engine that answers what one of --prefill has prefilled; may be repeated",
    )
    add(
        "--elastic",
        action="store_true",
        help="engines of --prefill and --decode can do both, and change their role with the load (needs --ttft, --tbt)",
    )
    add(
        "--handover",
        choices=("after", "overlap"),
        help="when the decode engine is asked: after the prefill, or at the same time (default: after)",
    )
    _add_split_from(add)
    add(
        "--sidecar",
        metavar="URL",
        help="serve this decode engine only; requests name their prefill engine in the header x-prefiller-host-port",
    )
    add(
        "--prefillers",
        metavar="LIST",
        help="hosts that the header may name: networks, addresses, names, separated by commas (default: private ones)",
    )
    add("--settings", type=Path, metavar="FILE", help="settings in TOML; reloaded on change and on SIGHUP")
    add("--listen", metavar="HOST:PORT", help="address to listen on (default: 127.0.0.1:8080; port 0: any free)")
    add("--strategy", metavar="NAME", help="routing strategy (default: least-ttft)")
    add("--option", action="append", default=[], metavar="NAME=VALUE", help="option of the strategy; may be repeated")
    add(
        "--cost",
        metavar="FILE|NAME",
        help="cost model from `skymemory fit`, or a preset (default: learnt while running)",
    )
    add(
        "--tokenizer",
        metavar="PATH",
        help="the model's tokenizer.json or its folder; blocks are then counted in tokens",
    )
    add("--block-tokens", type=int, metavar="N", help="tokens per block, as the engines have it")
    add("--max-body", type=size, metavar="SIZE", help="largest request body; 413 above (default: 16MiB)")
    add("--max-in-flight", type=int, metavar="N", help=argparse.SUPPRESS)
    add("--drain", type=duration, metavar="TIME", help="time for requests to finish on SIGTERM (default: 30s)")
    add("--admission", metavar="RULE", help="admission rule under overload (default: all; try goodput)")
    add("--ttft", type=duration, metavar="TIME", help="objective for the time to the first token, for --admission")
    add("--tbt", type=duration, metavar="TIME", help="objective for the time between tokens, for --elastic")
    add("--fair", action="store_true", default=None, help=argparse.SUPPRESS)
    add("--admission-option", action="append", default=[], metavar="NAME=VALUE", help=argparse.SUPPRESS)
    add("--queue", type=int, metavar="N", help="requests that may queue while every server is full (see --max-waiting)")
    add(
        "--max-waiting",
        type=int,
        metavar="N",
        help="requests without their first byte at which a server counts as full",
    )
    add("--api-keys", metavar="FILE", help="API keys and quotas of tenants (`skymemory keys api` adds a key)")
    add("--tls-cert", metavar="FILE", help="certificate chain (PEM): serve HTTPS")
    add("--tls-key", metavar="FILE", help="key of the certificate (PEM)")
    add(
        "--cors-origin",
        action="append",
        default=[],
        metavar="URL",
        help='origin whose pages may send requests, or "*"; may be repeated',
    )
    add("--state", metavar="FILE", help="file that keeps the prefix index and estimates over a restart")
    add("--log-requests", action="store_true", default=None, help="log one line per request to stderr")
    add("--check", action="store_true", help="check the servers, print their problems and exit")
    add("--json", action="store_true", help="print the result of --check as one JSON object")
    _add_picker(subparsers)


def _add_split_from(add: Callable[..., argparse.Action]) -> None:
    add(
        "--split-from",
        type=int,
        metavar="TOKENS",
        help="a prompt of which a decode engine lacks fewer tokens is served by it alone (default: 64; 0: none is)",
    )


def run(args: argparse.Namespace) -> int:
    if args.verb == "epp":
        check_router_installed("zmq", extras="envoy,router")
        return _pick(args)
    check_router_installed("httptools", "zmq")
    return _route(args)


def _route(args: argparse.Namespace) -> int:
    from skymemory.router.http.server import serve
    from skymemory.router.settings import read_settings
    from skymemory.testbed.key_file import read_keys

    flags = _flags(args)
    settings = read_settings(args.settings, flags)
    if not settings.backends:
        raise InvalidInput("route: no server: add --backend URL, or list them in the file of --settings")
    if args.check:
        return run_check(settings, read_keys, args.json)
    if args.json:
        raise InvalidInput("route: --json needs --check")
    return _run_server(serve(lambda: read_settings(args.settings, flags), args.settings, _print, read_keys))


def _run_server(server: Coroutine[Any, Any, int | None]) -> int:
    """Run until the server ends; uvloop takes less time per request."""
    import asyncio

    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    loop_factory = None
    try:
        import uvloop

        loop_factory = uvloop.new_event_loop
    except ImportError:
        pass
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(server) or 0


def _flags(args: argparse.Namespace) -> dict[str, Any]:
    table: dict[str, Any] = {
        "listen": args.listen,
        "strategy": args.strategy,
        "cost": args.cost,
        "drain": args.drain,
        "state": args.state,
        "log_requests": args.log_requests,
        "backends": _backends(args) or None,
        "disaggregation": {"handover": args.handover, "split_from": args.split_from},
        "sidecar": {
            "engine": args.sidecar,
            "prefillers": None if args.prefillers is None else [text.strip() for text in args.prefillers.split(",")],
        },
        "options": dict(_option(text) for text in args.option) or None,
        "prompts": {"tokenizer": args.tokenizer, "block_tokens": args.block_tokens},
        "admission": {
            "rule": args.admission,
            "ttft": args.ttft,
            "tbt": args.tbt,
            "fair": args.fair,
            "options": dict(_option(text) for text in args.admission_option) or None,
        },
        "limits": {"max_body": args.max_body, "max_in_flight": args.max_in_flight, "max_waiting": args.max_waiting},
        "queue": {"max_requests": args.queue},
        "door": {"api_keys": args.api_keys, "tls_cert": args.tls_cert, "tls_key": args.tls_key},
        "cors": {"origins": args.cors_origin or None},
    }
    return _without_unset(table)


def _backends(args: argparse.Namespace) -> list[dict[str, Any]]:
    if args.elastic and not (args.prefill and args.decode):
        raise InvalidInput("route: --elastic is about the engines of --prefill and --decode: name some of each")
    elastic = {"elastic": True} if args.elastic else {}
    roles = (("prefill", args.prefill), ("decode", args.decode))
    split = [{"url": url, "role": role, **elastic} for role, urls in roles for url in urls]
    return [*({"url": url} for url in args.backend), *split]


def run_check(settings: Settings, read_keys: Callable[[Path], KeyRing], as_json: bool) -> int:
    """Print the state of each server. Exit code 1 if a server has a problem."""
    import asyncio

    from skymemory.router.http.check import check

    key_file = settings.replicas.keys
    results = asyncio.run(check(settings, None if key_file is None else read_keys(key_file)))
    problems = sum(bool(result.problems) for result in results)
    if as_json:
        print(json.dumps({"servers": [result.as_json() for result in results], "with_problems": problems}, indent=2))
        return int(problems > 0)
    for result in results:
        write_line("\n".join(_lines(result)), hanging=2)
    write_line(f"{len(results) - problems} of {len(results)} servers have no problem")
    return int(problems > 0)


def _lines(result: ServerCheck) -> list[str]:
    lines = [
        f"{result.name}  {result.url}" if result.name not in result.url else result.url,
        f"  health   {result.health}",
    ]
    if result.metrics:
        lines.append(f"  metrics  {result.metrics}")
    if result.models:
        lines.append(f"  models   {', '.join(result.models[:8])}{' …' if len(result.models) > 8 else ''}")
    if result.events:
        lines.append(f"  events   {result.events}")
    lines += [f"  problem: {remark}" for remark in result.problems]
    lines += [f"  note: {remark}" for remark in result.notes]
    return lines


# The endpoint picker.


def _add_picker(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "epp",
        help="run an endpoint picker for Envoy (Gateway API inference extension)",
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
    add = parser.add_argument_group("model servers (one of the three ways)").add_argument
    add("--endpoint", action="append", metavar="IP:PORT", help="a model server; may be repeated")
    add(
        "--prefill",
        action="append",
        metavar="IP:PORT",
        help="a server for prefills only; the --endpoint's are then sidecars, which get its address (may be repeated)",
    )
    _add_split_from(add)
    add("--endpoints", metavar="FILE", help="file with one IP:PORT per line; reloaded on change")
    add("--apart", action="store_true", default=None, help="lines of --endpoints have roles, such as role=prefill")
    add("--discover", metavar="NAME:PORT", help="all addresses of a DNS name, such as a headless Service of Kubernetes")
    add("--discover-prefill", metavar="NAME:PORT", help="the same of servers for prefills only")
    add("--refresh", type=duration, metavar="TIME", help="interval of --endpoints and --discover (default: 5s)")
    add("--metrics-path", metavar="PATH", help="path of their metrics (default: /metrics; empty: not scraped)")
    add = parser.add_argument_group("picking").add_argument
    add("--strategy", metavar="NAME", help="routing strategy (default: the router's)")
    add("--option", action="append", default=[], metavar="NAME=VALUE", help="option of the strategy; may be repeated")
    add("--fallbacks", type=int, metavar="N", help="number of fallback endpoints per answer, best first (default: 0)")
    add("--tokenizer", metavar="PATH", help="the model's tokenizer; blocks are then counted in tokens")
    add("--block-tokens", type=int, metavar="N", help="tokens per block, with --tokenizer (default: 16)")
    add("--seed", type=int, metavar="N", help="seed of tie breaks (default: 0)")
    add(
        "--kv-events", type=int, metavar="PORT", help="port of every endpoint's KV events (ZMQ), for --strategy precise"
    )
    add("--kv-replay", type=int, metavar="PORT", help="port where lost KV events are requested again")
    add("--model", metavar="NAME", help="the model that the endpoints serve, as requests name it (with --kv-events)")
    add = parser.add_argument_group("limits").add_argument
    add("--max-requests", type=int, metavar="N", help="requests per server; 429 where all are full (default: no limit)")
    add("--max-streams", type=int, metavar="N", help="streams in total; 429 above (default: 10000)")
    add("--max-body", type=size, metavar="SIZE", help="largest body; 413 above (default: 16MiB)")
    add(
        "--tell-decisions",
        action="store_true",
        default=None,
        help="explain the choice to clients that send x-skymemory-decision",
    )
    add = parser.add_argument_group("state").add_argument
    add("--state", metavar="FILE", help="file that keeps the prefix index and estimates over a restart")
    add(
        "--replicas", metavar="URL", help="share state with other pickers through Redis or Valkey: redis://HOST:PORT/DB"
    )
    add("--replica-keys", metavar="FILE", help="key file that all pickers share (`skymemory keys new`)")
    add = parser.add_argument_group("addresses").add_argument
    add("--listen", metavar="IP:PORT", help="gRPC address (default: 127.0.0.1:9002; port 0: any free)")
    add("--health-listen", metavar="IP:PORT", help="a second gRPC health address without TLS, for probes")
    add("--metrics-listen", metavar="IP:PORT", help="HTTP address of /metrics for Prometheus")
    add("--grace", type=duration, metavar="TIME", help="time for requests to finish on SIGTERM (default: 30s)")
    add = parser.add_argument_group("TLS").add_argument
    add(
        "--self-signed",
        action="store_true",
        default=None,
        help="use a certificate made at the start, which gateways accept",
    )
    add("--tls-cert", metavar="FILE", help="certificate chain (PEM)")
    add("--tls-key", metavar="FILE", help="key of the certificate (PEM)")
    add("--tls-client-ca", metavar="FILE", help="accept only clients signed by this authority (PEM)")
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


def _pick(args: argparse.Namespace) -> int:
    from skymemory.router.envoy.server import serve
    from skymemory.router.settings import read_settings
    from skymemory.testbed.key_file import read_keys

    flags = _picker_flags(args)
    settings = read_settings(args.settings, flags)

    def started(picker: EndpointPicker) -> None:
        # Called once, when the sockets listen: addresses do not change on a reload.
        at_start = settings.picker
        at = _bound(at_start.listen, picker.server.port)
        over_tls = at_start.self_signed or at_start.tls_cert is not None
        _print(f"listening on {at}{' over TLS' if over_tls else ''}")
        if at_start.health_listen:
            _print(f"health at {_bound(at_start.health_listen, picker.server.health_port)}")
        if picker.metrics is not None:
            _print(f"metrics at http://{_bound(at_start.metrics_listen, picker.metrics.port)}/metrics")
        if args.envoy_config is not None:
            _write_envoy_config(args, at, settings)

    # Freezing the start-up objects, and rarer collections, save 6 % of a request's time.
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    return _run_server(serve(lambda: read_settings(args.settings, flags), args.settings, _print, read_keys, started))


def _picker_flags(args: argparse.Namespace) -> dict[str, Any]:
    from skymemory.router.envoy.endpoints import parse_endpoint

    table: dict[str, Any] = {
        "strategy": args.strategy,
        "seed": args.seed,
        "drain": args.grace,
        "state": args.state,
        "backends": [
            *({"url": f"http://{parse_endpoint(address)}"} for address in args.endpoint or ()),
            *({"url": f"http://{parse_endpoint(address)}", "role": "prefill"} for address in args.prefill or ()),
        ]
        or None,
        "options": dict(_option(text) for text in args.option) or None,
        "prompts": {"tokenizer": args.tokenizer, "block_tokens": args.block_tokens},
        "limits": {"max_body": args.max_body},
        "health": {"metrics_path": args.metrics_path},
        "disaggregation": {"split_from": args.split_from},
        "replicas": {"redis": _replicas(args.replicas), "keys": args.replica_keys},
        "picker": {
            "listen": args.listen,
            "health_listen": args.health_listen,
            "metrics_listen": args.metrics_listen,
            "endpoints": args.endpoints,
            "apart": args.apart,
            "discover": args.discover,
            "discover_prefill": args.discover_prefill,
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
    return _without_unset(table)


def _replicas(text: str | None) -> str | None:
    if text is None:
        return None
    kind, _, location = text.partition("://")
    # Removed in favour of Redis; old deployments still pass it.
    if kind == "gossip":
        raise InvalidInput(f"--replicas {text!r}: gossip was removed; expected redis://HOST:PORT/DB")
    if kind not in ("redis", "rediss", "unix") or not location:
        raise InvalidInput(f"--replicas {text!r}: expected redis://HOST:PORT/DB")
    return text


def _write_envoy_config(args: argparse.Namespace, at: str, settings: Settings) -> None:
    from skymemory.router.envoy.config import Entrance, bootstrap
    from skymemory.router.envoy.endpoints import as_endpoint
    from skymemory.router.settings import PREFILL

    host, _, port = at.rpartition(":")
    # A wildcard listen address cannot be connected to.
    everywhere = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
    entrance = Entrance(
        "inference",
        f"{everywhere.get(host, host)}:{port}",
        listen=_address(args.envoy_listen, "--envoy-listen"),
        endpoints=tuple(as_endpoint(backend).name for backend in settings.backends if backend.role != PREFILL),
        retries=settings.picker.fallbacks,
        retry_budget=settings.retries.budget,
        retry_floor=settings.retries.floor,
        max_ejected=settings.health.max_ejected,
        picker_tls=settings.picker.self_signed or settings.picker.tls_cert is not None,
    )
    try:
        args.envoy_config.write_text(json.dumps(bootstrap([entrance]), indent=1) + "\n", "utf-8")
    except OSError as error:
        raise SkyMemoryError(f"--envoy-config {args.envoy_config}: {error.strerror}") from error
    _print(f"wrote Envoy's configuration; run: envoy -c {args.envoy_config}")


def _bound(listen: str, port: int) -> str:
    return format_address(host_and_port(listen)[0], port)


def _address(text: str, option: str) -> str:
    try:
        return format_address(*host_and_port(text))
    except InvalidInput as error:
        raise InvalidInput(f"{option} {error}") from None


def _print(line: str) -> None:
    print(line, flush=True)


# Shared by both front ends.


def _without_unset(table: dict[str, Any]) -> dict[str, Any]:
    tables = {key: _without_unset(value) if isinstance(value, dict) else value for key, value in table.items()}
    # An empty table would replace the file's.
    return {key: value for key, value in tables.items() if value is not None and value != {}}


def _option(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise InvalidInput(f"--option {text!r}: expected NAME=VALUE")
    if value in ("true", "false"):
        return name, value == "true"
    for read in (parse_whole, float):
        try:
            return name, read(value)
        except ValueError:
            continue
    return name, value
