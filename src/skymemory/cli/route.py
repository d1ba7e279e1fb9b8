"""The router's front ends: ``skymemory route``, an OpenAI-compatible proxy, and ``skymemory epp``, Envoy's endpoint
picker.
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
from skymemory.cli._options import add_setting, add_settings_file, check_router_installed, given_settings
from skymemory.errors import InvalidInput, SkyMemoryError
from skymemory.text import write_line
from skymemory.units import parse_whole

if TYPE_CHECKING:
    from skymemory.cli.main import Subparsers
    from skymemory.keys import KeyRing
    from skymemory.router.envoy.picker_server import EndpointPicker
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
    for option, role in (
        ("--backend", "an engine, such as http://host:port"),
        ("--prefill", "an engine that only prefills; others answer (--decode)"),
        ("--decode", "an engine that answers what one of --prefill has prefilled"),
    ):
        add(option, action="append", default=[], metavar="URL", help=f"{role}; may be repeated")
    add_settings_file(parser, "settings in TOML; reloaded on change and on SIGHUP")
    setting = add_setting(parser)
    setting(
        "--listen", "listen", metavar="HOST:PORT", help="address to listen on (default: 127.0.0.1:8080; 0: any port)"
    )
    _add_strategy(parser, "least-ttft")
    setting("--api-keys", "door.api_keys", metavar="FILE", help="API keys and quotas (`skymemory keys api` adds a key)")
    setting("--tls-cert", "door.tls_cert", metavar="FILE", help="certificate chain (PEM): serve HTTPS")
    setting("--tls-key", "door.tls_key", metavar="FILE", help="key of the certificate (PEM)")
    setting("--cost", "cost", metavar="FILE|NAME", help="cost model from `skymemory fit`, or a preset")
    add("--check", action="store_true", help="check the servers, print their problems and exit")
    add("--json", action="store_true", help="print the result of --check as one JSON object")
    _add_picker(subparsers)


def _add_strategy(parser: argparse.ArgumentParser, default: str) -> None:
    setting = add_setting(parser)
    setting("--strategy", "strategy", metavar="NAME", help=f"routing strategy (default: {default})")
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="option of the strategy; may be repeated"
    )
    parser.add_argument(
        "--goal",
        metavar="GOAL",
        help="times that count most: to the first token (ttft), per token (tpot), of whole answers (e2e), or balanced",
    )
    setting(
        "--tokenizer",
        "prompts.tokenizer",
        metavar="PATH",
        help="the model's tokenizer.json or its folder; blocks are then counted in tokens",
    )


def run(args: argparse.Namespace) -> int:
    if args.verb == "epp":
        check_router_installed("zmq", extras="envoy,router")
        return _pick(args)
    check_router_installed("httptools", "zmq")
    return _route(args)


def _route(args: argparse.Namespace) -> int:
    from skymemory.router.http.proxy_server import serve
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
    roles = (("both", args.backend), ("prefill", args.prefill), ("decode", args.decode))
    backends = [{"url": url, "role": role} for role, urls in roles for url in urls]
    return _with_servers(args, backends)


def _with_servers(args: argparse.Namespace, backends: list[dict[str, str]]) -> dict[str, Any]:
    table = given_settings(args)
    options = dict(_option(text) for text in args.option)
    if args.goal is not None and options.setdefault("goal", args.goal) != args.goal:
        raise InvalidInput(f"--goal {args.goal} and --option goal={options['goal']}: give one of them")
    # An empty table would replace the file's.
    return {
        **table,
        **({"backends": backends} if backends else {}),
        **({"options": options} if options else {}),
    }


def run_check(settings: Settings, read_keys: Callable[[Path], KeyRing], as_json: bool) -> int:
    """Print the state of each server; exit code 1 for a problem."""
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
    add_settings_file(parser, "settings in TOML, as for `route`; reloaded on change and on SIGHUP")
    setting = add_setting(parser)
    add = parser.add_argument
    add("--endpoint", action="append", default=[], metavar="IP:PORT", help="a model server; may be repeated")
    add(
        "--prefill",
        action="append",
        default=[],
        metavar="IP:PORT",
        help="a server for prefills only; the --endpoint's are then sidecars, which get its address (may be repeated)",
    )
    setting("--discover", "picker.discover", metavar="NAME:PORT", help="all addresses of a DNS name are model servers")
    _add_strategy(parser, "the router's")
    setting("--listen", "picker.listen", metavar="IP:PORT", help="gRPC address (default: 127.0.0.1:9002; port 0: any)")
    setting("--health-listen", "picker.health_listen", metavar="IP:PORT", help="a gRPC health address without TLS")
    setting("--metrics-listen", "picker.metrics_listen", metavar="IP:PORT", help="HTTP address of /metrics")
    setting(
        "--self-signed",
        "picker.self_signed",
        action="store_true",
        help="use a certificate made at the start, which gateways accept",
    )
    setting("--tls-cert", "picker.tls_cert", metavar="FILE", help="certificate chain (PEM)")
    setting("--tls-key", "picker.tls_key", metavar="FILE", help="key of the certificate (PEM)")
    add(
        "--envoy-config",
        type=Path,
        metavar="FILE",
        help="write an Envoy configuration to try this picker with; clients connect to the file's `listen`",
    )


def _pick(args: argparse.Namespace) -> int:
    from skymemory.router.envoy.picker_server import serve
    from skymemory.router.limits.heap import trimmed_heap
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
    with trimmed_heap():
        serving = serve(lambda: read_settings(args.settings, flags), args.settings, _print, read_keys, started)
        return _run_server(serving)


def _picker_flags(args: argparse.Namespace) -> dict[str, Any]:
    from skymemory.router.envoy.endpoints import parse_endpoint

    roles = (("both", args.endpoint), ("prefill", args.prefill))
    backends = [
        {"url": f"http://{parse_endpoint(address)}", "role": role} for role, addresses in roles for address in addresses
    ]
    return _with_servers(args, backends)


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
        listen=format_address(*host_and_port(settings.listen)),
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


def _print(line: str) -> None:
    print(line, flush=True)


def _option(text: str) -> tuple[str, object]:
    """Parse NAME=VALUE: a boolean, a number or text."""
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
