"""``skymemory route``: an OpenAI-compatible proxy that sends each request where its prompt's cache is."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skymemory.cli._options import duration, option, said, size

if TYPE_CHECKING:
    from skymemory.cli.main import Subparsers
    from skymemory.router.http.check import Found
    from skymemory.router.settings import Settings


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "route",
        help="an OpenAI-compatible proxy that routes by prefix",
        description="Serve OpenAI's API in front of several engines (vLLM, SGLang, ...) and send each request to the "
        "one that is believed to hold most of its prompt, unless that one has too much to do. Runs until Ctrl-C.",
        epilog="Everything that --settings can say: docs/reference/router.md",
    )
    parser.add_argument(
        "--backend", action="append", default=[], metavar="URL", help="an engine, as http://host:port; once for each"
    )
    parser.add_argument(
        "--settings", type=Path, metavar="FILE", help="settings in TOML; followed while running, as is SIGHUP"
    )
    parser.add_argument("--listen", metavar="HOST:PORT", help="where to listen (default: 127.0.0.1:8080; port 0: any)")
    parser.add_argument("--strategy", metavar="NAME", help="how a server is chosen (default: the best we know)")
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="an option of the strategy; once for each"
    )
    parser.add_argument(
        "--cost",
        metavar="FILE|NAME",
        help="what prefills take, as `skymemory fit` found, or a preset (default: learnt)",
    )
    parser.add_argument(
        "--tokenizer", metavar="PATH", help="a tokenizer.json or a folder with one: blocks of tokens, not characters"
    )
    parser.add_argument("--block-tokens", type=int, metavar="N", help="tokens of a block, as the engines have it")
    parser.add_argument("--max-body", type=size, metavar="SIZE", help="larger bodies are refused (default: 16MiB)")
    parser.add_argument("--max-in-flight", type=int, metavar="N", help="requests at once (default: 4096)")
    parser.add_argument("--drain", type=duration, metavar="TIME", help="for requests to end on SIGTERM (default: 30s)")
    parser.add_argument("--admission", metavar="RULE", help="who is let in under overload (default: all; try goodput)")
    parser.add_argument("--ttft", type=duration, metavar="TIME", help="what is promised to the first token")
    parser.add_argument("--tbt", type=duration, metavar="TIME", help="what is promised between tokens; only counted")
    parser.add_argument(
        "--fair", action="store_true", default=None, help="priorities and fair shares of tenants under overload"
    )
    parser.add_argument(
        "--admission-option", action="append", default=[], metavar="NAME=VALUE", help="of the rule; once for each"
    )
    parser.add_argument(
        "--queue", type=int, metavar="N", help="requests that may wait where every server is full (--max-waiting)"
    )
    parser.add_argument(
        "--max-waiting", type=int, metavar="N", help="requests that wait for their first byte and make a server full"
    )
    parser.add_argument("--api-keys", metavar="FILE", help="who may ask, and how much (`skymemory keys api` adds one)")
    parser.add_argument("--tls-cert", metavar="FILE", help="certificate chain (PEM): serve HTTPS")
    parser.add_argument("--tls-key", metavar="FILE", help="its key (PEM)")
    parser.add_argument(
        "--cors-origin", action="append", default=[], metavar="URL", help='pages that may ask; once for each, or "*"'
    )
    parser.add_argument("--state", metavar="FILE", help="where what was learnt is kept over a restart")
    parser.add_argument("--log-requests", action="store_true", default=None, help="one line per request, on stderr")
    parser.add_argument(
        "--check", action="store_true", help="only look at the servers, and say what is wrong with which"
    )
    parser.add_argument("--json", action="store_true", help="with --check: one JSON object")


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
        raise InvalidInput("route: no server; name each with --backend URL, or in the file of --settings")
    if args.check:
        return run_check(settings, args.json)
    if args.json:
        raise InvalidInput("route: --json goes with --check")
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
    """What the flags say, as a settings file would."""
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
    return said(table)


# ``skymemory route --check``: what is behind the router, before it runs.


def run_check(settings: Settings, as_json: bool) -> int:
    """Prints what was found. The exit code: 0, or 1 where a server has a problem."""
    import asyncio

    from skymemory.router.http.check import check

    found = asyncio.run(check(settings))
    problems = sum(bool(each.problems) for each in found)
    if as_json:
        print(json.dumps({"servers": [each.as_json() for each in found], "with_problems": problems}, indent=2))
        return int(problems > 0)
    for each in found:
        print("\n".join(_lines(each)))
    print(f"{len(found) - problems} of {len(found)} servers are as they should be")
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
