"""Train the small model the package ships: ``python -m tools.small_model`` (``--help`` lists what can be changed).

Interrupt it at any time: it saves, and the next call goes on from there.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from tools.small_model import corpus
from tools.small_model.export import export
from tools.small_model.sources import SOURCES, Document, missing_packages, read_sources
from tools.small_model.train import Plan, Progress, Run, bits_per_byte

SHIPPED = Path("models/small/skymemory_small_model")


def main(arguments: list[str] | None = None) -> int:
    """Prepare the text, train or go on training, and measure; returns the exit status."""
    args = _parser().parse_args(arguments)
    torch.set_num_threads(args.threads)
    for number in (signal.SIGINT, signal.SIGTERM):  # also where the shell that started us had them ignored
        signal.signal(number, signal.default_int_handler)
    folder: Path = args.folder
    try:
        prepared = _prepared(folder)
    except KeyboardInterrupt:
        print("\ninterrupted while the text was prepared (some minutes): the same command starts that again")
        return 130
    if prepared is None:
        return 1
    tokenizer, stream, held_out = prepared
    ids = corpus.token_ids(tokenizer, held_out)
    sizes = [len(document.text.encode()) for document in held_out]
    quick = slice(0, None, 4)
    plan = Plan(tokens=args.tokens, minutes=args.minutes, seed=args.seed)
    run, checkpoint = Run(plan, stream), folder / "checkpoint.pt"
    if checkpoint.is_file():
        run.load(checkpoint)
        print(f"going on from {checkpoint}: {run.progress.tokens / 1e6:.2f} million tokens done", flush=True)
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    print(
        f"{parameters / 1e6:.2f} million parameters, {len(stream) / 1e6:.2f} million tokens of text, "
        f"{sum(sizes)} bytes held out, {args.threads} thread(s)",
        flush=True,
    )
    try:
        run.train(checkpoint, lambda model: bits_per_byte(model, ids[quick], sizes[quick]), _Reporter(plan))
    except KeyboardInterrupt:
        print(f"\ninterrupted: saved in {checkpoint}; the same command goes on from here")
        return 130
    shipped = run.model.to(torch.bfloat16)
    bits = bits_per_byte(shipped, ids, sizes)
    figures = {"documents": len(held_out), "bytes": sum(sizes), "bits_per_byte": round(bits, 4)}
    export(shipped, tokenizer, args.out, plan, run.progress, figures)
    progress = run.progress
    print(
        f"\n{args.out}: {bits:.3f} bits per byte of held-out text, after {progress.tokens / 1e6:.2f} million tokens, "
        f"{progress.wall_seconds / 60:.1f} minutes, {progress.cpu_seconds / 60:.1f} minutes of processor"
    )
    return 0


def _prepared(folder: Path) -> tuple[Tokenizer, np.ndarray, list[Document]] | None:
    """The tokenizer, the ids to learn from and the held-out documents; None, said aloud, where packages are absent."""
    missing = missing_packages()
    if missing:
        print(f"not installed: {', '.join(missing)}. The text comes from {len(SOURCES)} packages of Debian 12:")
        print("  apt-get install --no-install-recommends " + " ".join(source.package for source in SOURCES))
        return None
    folder.mkdir(parents=True, exist_ok=True)
    parts = corpus.split(read_sources())
    vocabulary, stream_file = folder / "tokenizer.json", folder / "train.npy"
    if not (vocabulary.is_file() and stream_file.is_file()):
        tokenizer = corpus.train_tokenizer(parts.train)
        np.save(stream_file, np.concatenate(corpus.token_ids(tokenizer, parts.train)))
        tokenizer.save(str(vocabulary))
    return Tokenizer.from_file(str(vocabulary)), np.load(stream_file), parts.held_out


class _Reporter:
    """One line that is rewritten on a terminal; in a file, a line at every measurement and once a minute."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._began, self._shown, self._bits = plan, time.monotonic(), 0.0, float("nan")

    def __call__(self, progress: Progress, loss: float, bits: float | None) -> None:
        self._bits = self._bits if bits is None else bits
        now, terminal = time.monotonic(), sys.stdout.isatty()
        if bits is None and now - self._shown < (1 if terminal else 60):
            return
        self._shown = now
        line = (
            f"{progress.fraction(self._plan):6.1%}  {progress.tokens / 1e6:6.2f} million tokens  "
            f"loss {loss:.3f} nats/token  held-out {self._bits:.3f} bits/byte  "
            f"{progress.tokens / progress.wall_seconds:.0f} tokens/s  {progress.wall_seconds / 60:.1f} min"
        )
        print(f"\r{line}\033[K" if terminal else line, end="" if terminal else "\n", flush=True)


def _parser() -> argparse.ArgumentParser:
    plan = Plan()
    parser = argparse.ArgumentParser(prog="python -m tools.small_model", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("build/small-model"), help="checkpoints and prepared text")
    parser.add_argument("--out", type=Path, default=SHIPPED, help="where the model goes (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=plan.tokens, help="to learn from (default %(default)s)")
    parser.add_argument("--minutes", type=float, default=plan.minutes, help="of training at most (default %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="processor threads (default %(default)s)")
    parser.add_argument("--seed", type=int, default=plan.seed)
    return parser


if __name__ == "__main__":
    sys.exit(main())
