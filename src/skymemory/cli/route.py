"""``skymemory route``: an OpenAI-compatible proxy that routes each request to the engine with its prompt's cache."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skymemory.cli._options import duration, option, size, without_unset

if TYPE_CHECKING:
    from skymemory.cli.main import Subparsers
    from skymemory.router.http.check import Found
    from skymemory.router.settings import Settings


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "route",
        help="an OpenAI-compatible proxy that routes by prompt prefix",
        description="Serve OpenAI's API in front of engines (vLLM, SGLang, ...) and send each request to the one with "
        " the shortest estimated time to the first token, given its cache and its queue. Runs until Ctrl-C.",
        epilog="All settings: docs/reference/router.md",
    )
    parser.add_argument(
        "--backend",
        action="append",
        default=[],
        metavar="URL",
        help="an engine, such as http://host:port; may be repeated",
    )
    parser.add_argument(
        "--settings", type=Path, metavar="FILE", help="settings in TOML; reloaded on change and on SIGHUP"
    )
    parser.add_argument(
        "--listen", metavar="HOST:PORT", help="address to listen on (default: 127.0.0.1:8080; port 0: any free)"
    )
    parser.add_argument("--strategy", metavar="NAME", help="routing strategy (default: least-ttft)")
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="option of the strategy; may be repeated"
    )
    parser.add_argument(
        "--cost",
        metavar="FILE|NAME",
        help="cost model from `skymemory fit`, or a preset (default: learnt while running)",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="the model's tokenizer.json or its folder; blocks are then counted in tokens",
    )
    parser.add_argument("--block-tokens", type=int, metavar="N", help="tokens per block, as the engines have it")
    parser.add_argument(
        "--max-body", type=size, metavar="SIZE", help="largest request body; 413 above (default: 16MiB)"
    )
    parser.add_argument("--max-in-flight", type=int, metavar="N", help=argparse.SUPPRESS)
    parser.add_argument(
        "--drain", type=duration, metavar="TIME", help="time for requests to finish on SIGTERM (default: 30s)"
    )
    parser.add_argument("--admission", metavar="RULE", help="admission rule under overload (default: all; try goodput)")
    parser.add_argument(
        "--ttft", type=duration, metavar="TIME", help="objective for the time to the first token, for --admission"
    )
    parser.add_argument("--tbt", type=duration, metavar="TIME", help=argparse.SUPPRESS)
    parser.add_argument("--fair", action="store_true", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--admission-option", action="append", default=[], metavar="NAME=VALUE", help=argparse.SUPPRESS)
    parser.add_argument(
        "--queue", type=int, metavar="N", help="requests that may queue while every server is full (see --max-waiting)"
    )
    parser.add_argument(
        "--max-waiting",
        type=int,
        metavar="N",
        help="requests without their first byte at which a server counts as full",
    )
    parser.add_argument(
        "--api-keys", metavar="FILE", help="API keys and quotas of tenants (`skymemory keys api` adds a key)"
    )
    parser.add_argument("--tls-cert", metavar="FILE", help="certificate chain (PEM): serve HTTPS")
    parser.add_argument("--tls-key", metavar="FILE", help="key of the certificate (PEM)")
    parser.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="URL",
        help='origin whose pages may send requests, or "*"; may be repeated',
    )
    parser.add_argument("--state", metavar="FILE", help="file that keeps the prefix index and estimates over a restart")
    parser.add_argument("--log-requests", action="store_true", default=None, help="log one line per request to stderr")
    parser.add_argument("--check", action="store_true", help="check the servers, print their problems and exit")
    parser.add_argument("--json", action="store_true", help="print the result of --check as one JSON object")


def run(args: argparse.Namespace) -> int:
    import asyncio
    import logging
    import sys

    from skymemory.errors import InvalidInput, MissingExtra

    try:
        from skymemory.router.http.server import serve
        from skymemory.router.settings import read_settings
        from skymemory.testbed.key_file import read_keys
    except ModuleNotFoundError as error:
        raise MissingExtra(f"{error.name} is missing: pip install 'skymemory[router]'") from error
    flags = _flags(args)
    settings = read_settings(args.settings, flags)
    if not settings.backends:
        raise InvalidInput("route: no server: add --backend URL, or list them in the file of --settings")
    if args.check:
        return run_check(settings, args.json)
    if args.json:
        raise InvalidInput("route: --json needs --check")
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    loop_factory = None
    try:
        import uvloop

        loop_factory = uvloop.new_event_loop
    except ImportError:
        pass
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(
            serve(
                lambda: read_settings(args.settings, flags),
                args.settings,
                lambda line: print(line, flush=True),
                read_keys,
            )
        )


def _flags(args: argparse.Namespace) -> dict[str, Any]:
    """The flags as a table of settings."""
    table: dict[str, Any] = {
        "listen": args.listen,
        "strategy": args.strategy,
        "cost": args.cost,
        "drain": args.drain,
        "state": args.state,
        "log_requests": args.log_requests,
        "backends": [{"url": url} for url in args.backend] or None,
        "options": dict(option(each) for each in args.option) or None,
        "prompts": {"tokenizer": args.tokenizer, "block_tokens": args.block_tokens},
        "admission": {
            "rule": args.admission,
            "ttft": args.ttft,
            "tbt": args.tbt,
            "fair": args.fair,
            "options": dict(option(each) for each in args.admission_option) or None,
        },
        "limits": {
            "max_body": args.max_body,
            "max_in_flight": args.max_in_flight,
            "max_waiting": args.max_waiting,
        },
        "queue": {"max_requests": args.queue},
        "door": {"api_keys": args.api_keys, "tls_cert": args.tls_cert, "tls_key": args.tls_key},
        "cors": {"origins": args.cors_origin or None},
    }
    return without_unset(table)


def run_check(settings: Settings, as_json: bool) -> int:
    """``--check``: prints the state of each server. Exit code 1 if one has a problem."""
    import asyncio

    from skymemory.router.http.check import check

    found = asyncio.run(check(settings))
    problems = sum(bool(each.problems) for each in found)
    if as_json:
        print(json.dumps({"servers": [each.as_json() for each in found], "with_problems": problems}, indent=2))
        return int(problems > 0)
    for each in found:
        print("\n".join(_lines(each)))
    print(f"{len(found) - problems} of {len(found)} servers have no problem")
    return int(problems > 0)


def _lines(found: Found) -> list[str]:
    lines = [f"{found.name}  {found.url}" if found.name not in found.url else found.url, f"  health   {found.health}"]
    if found.metrics:
        lines.append(f"  metrics  {found.metrics}")
    if found.models:
        lines.append(f"  models   {', '.join(found.models[:8])}{' …' if len(found.models) > 8 else ''}")
    if found.events:
        lines.append(f"  events   {found.events}")
    lines += [f"  problem: {each}" for each in found.problems]
    lines += [f"  note: {each}" for each in found.notes]
    return lines
