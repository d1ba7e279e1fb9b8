"""``skymemory epp``: the endpoint picker that Envoy, and gateways built on it, ask where a request should go."""

from __future__ import annotations

import argparse
import gc
import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skymemory.cli._options import duration, size
from skymemory.errors import InvalidInput, SkyMemoryError

if TYPE_CHECKING:
    from skymemory.cli.main import Subparsers
    from skymemory.router.desk import Desk
    from skymemory.router.endpoints import Source
    from skymemory.router.epp import EndpointPicker, PickerPlan
    from skymemory.router.ext_proc_server import Certificate

TOKENIZED_ELSEWHERE_BYTES = 16 << 10
"""About 5 ms of a tokenizer's time: a thread costs a twentieth of that."""
LISTEN = "127.0.0.1:9002"


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "epp",
        help="pick endpoints for Envoy (Gateway API inference extension)",
        description="An endpoint picker for Envoy and gateways of the Gateway API inference extension: they ask it, "
        "by external processing, which model server gets a request. Runs until Ctrl-C. To try it: start it with "
        "--envoy-config envoy.json, then `envoy -c envoy.json`.",
    )
    servers = parser.add_argument_group("model servers (one way)")
    servers.add_argument("--endpoint", action="append", metavar="IP:PORT", help="a model server; may be repeated")
    servers.add_argument(
        "--endpoints", type=Path, metavar="FILE", help="one IP:PORT a line; read again when it changes"
    )
    servers.add_argument(
        "--discover", metavar="NAME:PORT", help="every address of a DNS name, such as a headless Service of Kubernetes"
    )
    servers.add_argument(
        "--refresh", type=duration, default=5.0, metavar="TIME", help="how often those are looked up (default: 5s)"
    )
    servers.add_argument(
        "--metrics-path", default="/metrics", metavar="PATH", help="where they tell their load; empty: not asked"
    )
    picking = parser.add_argument_group("picking")
    picking.add_argument("--strategy", metavar="NAME", help="how servers are chosen (default: the router's)")
    picking.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="an option of the strategy; may be repeated"
    )
    picking.add_argument(
        "--fallbacks",
        type=int,
        default=0,
        metavar="N",
        help="further endpoints to name, best first, for data planes that try them in turn (default: 0)",
    )
    picking.add_argument("--tokenizer", type=Path, metavar="PATH", help="of the model: blocks are its tokens then")
    picking.add_argument("--block-tokens", type=int, default=16, metavar="N", help="with a tokenizer (default: 16)")
    picking.add_argument("--seed", type=int, default=0, help="of what breaks ties (default: 0)")
    picking.add_argument(
        "--kv-events", type=int, metavar="PORT", help="of endpoints: ZMQ events of their caches, for `precise`"
    )
    picking.add_argument("--kv-replay", type=int, metavar="PORT", help="where lost events are asked for again")
    picking.add_argument("--model", metavar="NAME", help="that the endpoints serve, as requests name it (with events)")
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--max-requests", type=int, metavar="N", help="at one server; where all have as many: 429 (default: any number)"
    )
    limits.add_argument(
        "--max-streams", type=int, default=10_000, metavar="N", help="in all; more: 429 (default: 10000)"
    )
    limits.add_argument("--max-body", type=size, default=16 << 20, metavar="SIZE", help="longer: 413 (default: 16MiB)")
    limits.add_argument(
        "--tell-decisions", action="store_true", help="answer clients that send x-skymemory-decision with the reasons"
    )
    doors = parser.add_argument_group("addresses")
    doors.add_argument(
        "--listen", default=LISTEN, metavar="IP:PORT", help=f"gRPC (default: {LISTEN}; port 0: any free)"
    )
    doors.add_argument(
        "--health-listen", metavar="IP:PORT", help="gRPC health without TLS too, for probes that have none"
    )
    doors.add_argument("--metrics-listen", metavar="IP:PORT", help="HTTP /metrics for Prometheus")
    doors.add_argument(
        "--grace", type=duration, default=30.0, metavar="TIME", help="for requests to end (default: 30s)"
    )
    tls = parser.add_argument_group("TLS")
    tls.add_argument("--self-signed", action="store_true", help="with a certificate made now, as gateways accept it")
    tls.add_argument("--tls-cert", type=Path, metavar="FILE", help="certificate chain (PEM)")
    tls.add_argument("--tls-key", type=Path, metavar="FILE", help="its key (PEM)")
    tls.add_argument("--tls-client-ca", type=Path, metavar="FILE", help="only clients that this authority signed (PEM)")
    envoy = parser.add_argument_group("an Envoy of your own")
    envoy.add_argument("--envoy-config", type=Path, metavar="FILE", help="write a configuration that asks this picker")
    envoy.add_argument(
        "--envoy-listen", default="127.0.0.1:8080", metavar="IP:PORT", help="for clients (default: 127.0.0.1:8080)"
    )


def run(args: argparse.Namespace) -> int:
    import asyncio

    from skymemory.router.epp import EndpointPicker, PickerPlan

    plan = PickerPlan(
        listen=_address(args.listen, "--listen"),
        health_listen=args.health_listen and _address(args.health_listen, "--health-listen"),
        metrics_listen=args.metrics_listen and _address(args.metrics_listen, "--metrics-listen"),
        certificate=_certificate(args),
        refresh_s=args.refresh,
        metrics_path=args.metrics_path or None,
        grace_s=args.grace,
        events_port=args.kv_events,
        replay_port=args.kv_replay,
        model=args.model or "",
    )
    if args.refresh <= 0:
        raise InvalidInput("--refresh: expected a time above 0")
    desk, source = _desk(args), _source(args)
    _check_events(args, desk)
    loop_factory = None
    try:
        import uvloop

        loop_factory = uvloop.new_event_loop
    except ImportError:
        pass
    # What is there now stays: left out of collections, and those made rarer, a request takes 6 % less time.
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(_run(EndpointPicker(desk, source, plan, _say), plan, args))
    return 0


async def _run(picker: EndpointPicker, plan: PickerPlan, args: argparse.Namespace) -> None:
    import asyncio

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)

    def started() -> None:
        host = plan.listen.rpartition(":")[0]
        at = f"{host}:{picker.server.port}"
        _say(f"picks at {at}{' over TLS' if plan.certificate else ''}")
        if plan.health_listen:
            _say(f"tells its health at {plan.health_listen.rpartition(':')[0]}:{picker.server.health_port}")
        if picker.metrics is not None and plan.metrics_listen:
            _say(
                f"tells what it counts at http://{plan.metrics_listen.rpartition(':')[0]}:{picker.metrics.port}/metrics"
            )
        if args.envoy_config is not None:
            _write_envoy_config(args, at)

    await picker.run(stop, started)


def _desk(args: argparse.Namespace) -> Desk:
    from skymemory.conductor.fleet import Fleet
    from skymemory.conductor.picker import Picker
    from skymemory.conductor.strategies.named import DEFAULT, NAMES, named, options_of
    from skymemory.router.desk import Desk, DeskSettings
    from skymemory.router.fleet_adapters import FleetAdapters
    from skymemory.router.prompts import PromptReader

    tokenizer = None
    if args.tokenizer is not None:
        from skymemory.router.tokenizing import PromptTokenizer

        tokenizer = PromptTokenizer(args.tokenizer)
    for option in ("fallbacks", "max_requests", "max_streams", "max_body", "block_tokens"):
        value = getattr(args, option)
        if value is not None and value < (0 if option == "fallbacks" else 1):
            raise InvalidInput(f"--{option.replace('_', '-')}: expected a positive number, got {value}")
    fleet, strategy = Fleet(), args.strategy or DEFAULT
    options: dict[str, Any] = dict(_option(text) for text in args.option)
    if strategy in NAMES and "block_tokens" in options_of(strategy):
        # Events tell blocks of the engines' size; prompts are cut by the same.
        said = str(options.setdefault("block_tokens", args.block_tokens))
        if said != str(args.block_tokens):
            raise InvalidInput("--option block_tokens and --block-tokens differ; both must be the engines' block size")
    reader = PromptReader(
        tokenizer=tokenizer,
        block_tokens=args.block_tokens,
        max_body_bytes=args.max_body,
        adapters=FleetAdapters(fleet),
    )
    settings = DeskSettings(
        fallbacks=args.fallbacks,
        most_body_bytes=args.max_body,
        most_streams=args.max_streams,
        most_requests=args.max_requests,
        tell_decisions=args.tell_decisions,
    )
    picker = Picker(fleet, named(strategy, **options), seed=args.seed)
    return Desk(
        picker, reader, settings, reads_elsewhere_bytes=None if tokenizer is None else TOKENIZED_ELSEWHERE_BYTES
    )


def _option(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals or name in ("index", "cost"):  # arguments of `named` that are no options
        raise InvalidInput(f"--option {text!r}: expected NAME=VALUE")
    return name, value


def _check_events(args: argparse.Namespace, desk: Desk) -> None:
    """A strategy that goes by events needs them, and the engines' own blocks; the others have no use for them."""
    from skymemory.router.proxy_events import event_index

    wanted, name = event_index(desk.picker.scorer) is not None, desk.picker.scorer.name
    if wanted and not (args.kv_events and args.model and args.tokenizer):
        raise InvalidInput(
            f"strategy {name!r} goes by the events of engines' caches: it needs --kv-events PORT, --model NAME and "
            "--tokenizer PATH"
        )
    if not wanted and (args.kv_events or args.kv_replay):
        raise InvalidInput(f"strategy {name!r} has no use for --kv-events")


def _source(args: argparse.Namespace) -> Source:
    from skymemory.router.endpoints import FileSource, FixedSource, NameSource

    given = [name for name in ("endpoint", "endpoints", "discover") if getattr(args, name)]
    if len(given) != 1:
        raise InvalidInput(
            "name the model servers in one way: --endpoint IP:PORT, --endpoints FILE or --discover NAME:PORT"
        )
    if args.endpoint:
        return FixedSource(args.endpoint)
    if args.endpoints:
        try:
            return FileSource(args.endpoints, _say)
        except OSError as error:
            raise InvalidInput(f"--endpoints {args.endpoints}: {error.strerror}") from error
    return NameSource(args.discover, _say)


def _certificate(args: argparse.Namespace) -> Certificate | None:
    from skymemory.router.certificates import from_files, self_signed

    if args.self_signed and (args.tls_cert or args.tls_key):
        raise InvalidInput("--self-signed makes a certificate; --tls-cert and --tls-key give one: choose")
    if bool(args.tls_cert) != bool(args.tls_key):
        raise InvalidInput("--tls-cert and --tls-key go together")
    if args.tls_cert:
        return from_files(args.tls_cert, args.tls_key, args.tls_client_ca)
    if args.tls_client_ca:
        raise InvalidInput("--tls-client-ca needs --tls-cert and --tls-key")
    return self_signed() if args.self_signed else None


def _address(text: str, option: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise InvalidInput(f"{option} {text!r}: expected IP:PORT, as {LISTEN}")
    return text


def _write_envoy_config(args: argparse.Namespace, at: str) -> None:
    from skymemory.router.envoy_config import Entrance, bootstrap

    host, _, port = at.rpartition(":")
    everywhere = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
    entrance = Entrance(
        "inference",
        f"{everywhere.get(host, host)}:{port}",
        listen=_address(args.envoy_listen, "--envoy-listen"),
        endpoints=tuple(args.endpoint or ()),
        retries=args.fallbacks,
        picker_tls=args.self_signed or bool(args.tls_cert),
    )
    try:
        args.envoy_config.write_text(json.dumps(bootstrap([entrance]), indent=1) + "\n", "utf-8")
    except OSError as error:
        raise SkyMemoryError(f"--envoy-config {args.envoy_config}: {error.strerror}") from error
    _say(f"Envoy's configuration is in {args.envoy_config}: envoy -c {args.envoy_config}")


def _say(line: str) -> None:
    print(line, flush=True)
