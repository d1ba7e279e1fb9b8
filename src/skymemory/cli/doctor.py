"""``skymemory doctor``: diagnosis of a hit rate of 0."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from skymemory.cli._options import add_json
from skymemory.errors import InvalidInput, cannot_read
from skymemory.files import read_json
from skymemory.text import write_line

if TYPE_CHECKING:
    from skymemory.cli.main import Subparsers
    from skymemory.engine.doctor import Examination
    from skymemory.engine.vllm.identity import EngineReport

_MOST_BYTES = 1 << 20


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="diagnose a hit rate of 0",
        description="Use a model, its tokenizer and a store as a request would: compute blocks, store and load them. "
        "The exit code is 1 if something is wrong. With --save and --compare it shows in what two computers differ; "
        "with --vllm, in what engines of vLLM do, which need not be installed here.",
    )
    add = parser.add_argument
    add(
        "--model",
        default="small",
        metavar="NAME|DIR",
        help="a folder saved by transformers, or a name as for `serve` (default: small)",
    )
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="bfloat16",
        help="data type of the model (default: bfloat16)",
    )
    add("--store", metavar="ADDRESS", help="store to try (default: memory of this process; of vLLM, as its log says)")
    add("--block-tokens", type=int, default=128, metavar="N", help="tokens of a block (default: 128)")
    add("--save", type=Path, metavar="FILE", help="write the cache context, for --compare on another computer")
    add("--compare", type=Path, metavar="FILE", help="compare with a context that --save wrote on another computer")
    add(
        "--vllm",
        type=Path,
        action="append",
        metavar="LOG",
        help="log of a vLLM with the connector, such as <(kubectl logs POD); repeated: do they share blocks?",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    if args.vllm:
        from skymemory.engine.doctor import examine_vllm

        if args.save is not None or args.compare is not None:
            raise InvalidInput("--vllm compares logs: write --vllm LOG --vllm LOG, without --save and --compare")
        return _printed(args, examine_vllm({str(path): _report(path) for path in args.vllm}, args.store))
    from skymemory.engine.inputs import check_engine_installed, check_model, shipped_document

    check_model(args.model)
    # Checked before the model is loaded and measured.
    if args.save is not None and not args.save.parent.is_dir():
        raise InvalidInput(f"--save {args.save}: no folder {str(args.save.parent)!r}")
    check_engine_installed(args.model)
    expected = "what --save wrote on the other computer"
    other = None if args.compare is None else read_json(args.compare, expected, _MOST_BYTES)
    from transformers.utils import logging as transformers_logging

    from skymemory.engine.doctor import examine, open_in_time
    from skymemory.engine.transformers.models import ready_model
    from skymemory.testbed.open_store import open_store

    transformers_logging.disable_progress_bar()
    # Before the model, which takes seconds: the address may be wrong.
    address = args.store or "memory://1GiB"
    with open_in_time(lambda: open_store(address), lambda late: late.close()) as store:
        ready = ready_model(args.model, dtype=args.dtype)
        result = examine(
            ready.model,
            ready.tokenizer,
            store,
            shipped_document(),
            other,
            block_tokens=args.block_tokens,
        )
    if args.save is not None and result.context:
        args.save.write_text(json.dumps(result.context, indent=1) + "\n", encoding="utf-8")
    return _printed(args, result)


def _printed(args: argparse.Namespace, result: Examination) -> int:
    if args.json:
        findings = [{"what": finding.what, "well": finding.well, "words": finding.words} for finding in result.findings]
        print(json.dumps({"well": result.well, "findings": findings, "context": result.context}))
    else:
        for finding in result.findings:
            write_line(f"{'ok   ' if finding.well else 'WRONG'}  {finding.what}: {finding.words}", hanging=7)
    return 0 if result.well else 1


def _report(path: Path) -> EngineReport:
    """Read what vLLM's connector wrote into a log."""
    from skymemory.engine.vllm.identity import EngineReport

    try:
        with path.open("rb") as file:
            lines = iter(lambda: file.readline(_MOST_BYTES), b"")
            return EngineReport.read(line.decode("utf-8", "replace") for line in lines)
    except OSError as error:
        raise InvalidInput(cannot_read(path, error)) from error
    except InvalidInput as error:
        raise InvalidInput(f"--vllm {path}: {error}") from error
