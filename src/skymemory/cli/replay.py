"""``skymemory replay``: a trace's requests sent to any OpenAI endpoint at their times, and what came of them."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from skymemory.cli._options import add_json, duration, token_ids
from skymemory.errors import InvalidInput, MissingExtra

if TYPE_CHECKING:
    from skymemory.cli.main import Subparsers

UNITS = ("tokens", "characters", "ids")


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "replay",
        help="send a trace's requests to an OpenAI endpoint",
        description="Send the requests of a trace (Mooncake's format) or of the generator to any OpenAI endpoint, each "
        "when it is due, and report times to the first token and between tokens, hits, refusals and how late the "
        "client itself was. Prompts are made up: equal block ids give equal prefixes, of the trace's lengths.",
        epilog="docs/guide/replay.md says what each figure means.",
    )
    parser.add_argument(
        "trace", nargs="?", type=Path, help="JSON lines with timestamp, input_length, output_length, hash_ids"
    )
    parser.add_argument("--url", required=True, help="the endpoint, as http://127.0.0.1:8000")
    what = parser.add_argument_group("what is sent")
    what.add_argument("--workload", metavar="NAME", help="of the generator, without a trace: conversations or tenants")
    what.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and generator (default: 0)")
    what.add_argument("--requests", type=int, metavar="N", help="the first N only")
    what.add_argument("--seconds", type=duration, metavar="TIME", help="only what is due in so long, of this replay")
    what.add_argument(
        "--scale-lengths", type=float, default=1.0, metavar="X", help="prompts and answers X times as long"
    )
    what.add_argument("--max-tokens", type=int, metavar="N", help="of an answer at most")
    what.add_argument(
        "--prompt-unit",
        choices=UNITS,
        default="tokens",
        help="a token of the trace becomes a token, by the server's own count; a character; or a token id, where "
        "the server takes lists of them (default: tokens)",
    )
    what.add_argument("--ids", metavar="A-B", default="300-1000", help="token ids to choose from (default: 300-1000)")
    when = parser.add_argument_group("when")
    when.add_argument("--rate", type=float, default=1.0, metavar="X", help="requests come X times as fast (default: 1)")
    when.add_argument(
        "--jitter",
        type=duration,
        default=0.0,
        metavar="TIME",
        help="arrivals moved by up to so much of the trace's time",
    )
    when.add_argument(
        "--concurrency", type=int, metavar="N", help="requests under way at most; others wait, and are late"
    )
    how = parser.add_argument_group("how")
    how.add_argument(
        "--api", choices=("completions", "chat"), default="completions", help="which door (default: completions)"
    )
    how.add_argument("--model", metavar="NAME", help="(default: the one that the endpoint serves)")
    how.add_argument(
        "--context", type=int, metavar="N", help="longer requests are left out (default: what the endpoint says)"
    )
    how.add_argument(
        "--api-key-env",
        default="OPENAI_API_KEY",
        metavar="NAME",
        help="the environment variable that holds the key, if there is one (default: OPENAI_API_KEY)",
    )
    how.add_argument(
        "--patience", type=duration, default=300.0, metavar="TIME", help="for a whole answer (default: 300s)"
    )
    told = parser.add_argument_group("what is told")
    told.add_argument("--ttft-slo", type=duration, metavar="TIME", help="wanted: from due to the first token, at most")
    told.add_argument(
        "--tbt-slo", type=duration, metavar="TIME", help="wanted: a request's mean time between tokens, at most"
    )
    told.add_argument(
        "--metrics",
        action="append",
        default=[],
        metavar="URL",
        help="an engine whose own counts are shown beside; once for each",
    )
    told.add_argument("--out", type=Path, metavar="FILE", help="one JSON line for each request")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    check(args)
    try:
        from skymemory.cli._runs.replay import replay
    except ModuleNotFoundError as error:
        raise MissingExtra(f"{error.name} is missing: pip install 'skymemory[router]'") from error
    return replay(args, os.environ.get(args.api_key_env) or None)


def check(args: argparse.Namespace) -> None:
    """Raises InvalidInput for what cannot go together; looks at no file and asks nobody."""
    if (args.trace is None) == (args.workload is None):
        raise InvalidInput("replay: name a trace, or --workload, and not both")
    if args.workload is not None and args.workload not in ("conversations", "tenants"):
        raise InvalidInput(f"--workload {args.workload!r}: there are conversations and tenants")
    if args.workload is not None and args.seconds is None and args.requests is None:
        raise InvalidInput("--workload has no end by itself: say --seconds or --requests")
    for name in ("requests", "max_tokens", "concurrency", "context"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise InvalidInput(f"--{name.replace('_', '-')} {getattr(args, name)}: expected 1 or more")
    if not args.rate > 0:
        raise InvalidInput(f"--rate {args.rate:g}: expected a factor above 0")
    if args.patience <= 0:
        raise InvalidInput("--patience: expected more than 0")
    if args.prompt_unit == "ids" and args.api == "chat":
        raise InvalidInput("--prompt-unit ids: chats take no token ids; use --api completions")
    token_ids(args.ids)
