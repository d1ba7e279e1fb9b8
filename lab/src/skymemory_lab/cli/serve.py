"""``skymemory serve``: a small inference engine with OpenAI's API."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skymemory.addresses import host_and_port
from skymemory.cli._options import add_rare_settings, argument, check_serving_installed, size
from skymemory.config import duration, one_of, setting, text, whole_number
from skymemory.errors import InvalidInput
from skymemory.eviction import POLICIES
from skymemory.progress import Progress

if TYPE_CHECKING:
    from skymemory.cli.main import Subparsers


# Upper limits for a test engine; beyond them a typing error is more likely than an intention.
_MOST = {"block_tokens": 4096, "threads": 1024, "running": 4096, "engines": 64}
_MOST_WAITING = 1 << 20


@dataclass(frozen=True, slots=True)
class ServeSettings:
    policy: str = setting("policy", one_of(*POLICIES), "lru", f"eviction policy of the cache: {', '.join(POLICIES)}")
    dtype: str = setting("dtype", one_of("float32", "bfloat16", "float16"), "float32", "data type of the model")
    context: int = setting("context", whole_number, 0, "limit of prompt and answer in tokens; 0: the model's")
    waiting: int = setting("waiting", whole_number, 256, "limit of queued requests; 429 above")
    kv_replay: str = setting(
        "kv_replay", text, "tcp://127.0.0.1:*", "endpoint that resends missed KV events; port *: any free"
    )
    wait_s: float = setting(
        "wait", duration, 5.0, "how long a request waits for the next block that another engine computes"
    )

    def __post_init__(self) -> None:
        if not 1 <= self.waiting <= _MOST_WAITING:
            raise InvalidInput(f"waiting: {self.waiting}: expected 1 to {_MOST_WAITING}")


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "serve",
        help="run a small inference engine with OpenAI's API",
        description="Serve a model with OpenAI's API (/v1/completions, /v1/chat/completions, /v1/models; streamed or "
        "not) and a prefix cache, until Ctrl-C. /metrics and KV events are vLLM's. It is meant for testing routers and "
        "clients: prompts are computed one at a time, and there is no authentication.",
    )
    add = parser.add_argument
    add(
        "--model",
        default="small",
        metavar="NAME|DIR",
        help="small (the trained model that is shipped), small-random, tinyllama-random, tinyllama-6-random, or a "
        "folder saved by transformers (default: small)",
    )
    add("--name", default="", metavar="NAME", help="name of the model in requests (default: its name or its folder's)")
    add(
        "--listen",
        type=argument(host_and_port),
        default=("127.0.0.1", 8000),
        metavar="HOST:PORT",
        help="address to listen on; port 0: any free (default: 127.0.0.1:8000)",
    )
    add("--cache", type=size, default=64 << 20, metavar="SIZE", help="memory of the prefix cache (default: 64MiB)")
    add("--block-tokens", type=int, default=16, metavar="N", help="tokens of a cache block (default: 16)")
    add("--threads", type=int, default=1, metavar="N", help="compute threads (default: 1)")
    add("--running", type=int, default=8, metavar="N", help="limit of running requests (default: 8)")
    add(
        "--engines",
        type=int,
        default=1,
        metavar="N",
        help="number of engine processes, on successive ports (default: 1)",
    )
    add("--kv-events", metavar="ENDPOINT", help="publish KV events there, such as tcp://127.0.0.1:5557 (ZeroMQ)")
    add(
        "--store",
        default="",
        metavar="ADDRESS",
        help="store of blocks that engines share, such as unix:///run/sky.sock of `skymemory store serve` or "
        "constellation (default: none)",
    )
    add(
        "--role",
        choices=("producer", "consumer", "both"),
        default="both",
        help="producer: prefills, and saves in the store; consumer: decodes what others have saved (default: both)",
    )
    add_rare_settings(parser, ServeSettings)


def run(args: argparse.Namespace) -> int:
    from skymemory.engine.inputs import check_model

    for option, most in _MOST.items():
        if not 1 <= getattr(args, option) <= most:
            raise InvalidInput(f"--{option.replace('_', '-')} {getattr(args, option)}: expected 1 to {most}")
    check_model(args.model)
    check_serving_installed(args.model)
    progress = Progress(sys.stderr)
    with progress.wait("loading torch and transformers"):
        from skymemory_lab.engine.run import EngineSettings, run_engine, run_engines

    host, port = args.listen
    rare: ServeSettings = args.settings
    settings = EngineSettings(
        model=args.model,
        served_name=args.name,
        host=host,
        port=port,
        cache_bytes=args.cache,
        block_tokens=args.block_tokens,
        policy=rare.policy,
        dtype=rare.dtype,
        threads=args.threads,
        context_tokens=rare.context or None,
        max_running=args.running,
        max_waiting=rare.waiting,
        kv_events=args.kv_events,
        kv_replay=rare.kv_replay,
        store=args.store,
        role=args.role,
        wait_s=rare.wait_s,
    )
    if args.engines == 1:
        run_engine(settings, _say, progress=progress)
    else:
        run_engines(settings, args.engines, _say)
    return 0


def _say(words: str) -> None:
    print(words, flush=True)
