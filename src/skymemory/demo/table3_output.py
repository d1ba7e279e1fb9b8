"""What the demo of table 3 prints: its steps as they happen, and the table at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from skymemory.units import format_size

BLOCK_TOKENS = 128
_PAPER = {"quanto8": (6.2, 4.9), "hqq8": (10.2, 7.8)}
"""Table 3 of the paper: 30 tokens on a Jetson Nano without and with the cache, seconds."""
_NAMES = {"raw": "none (16 bit)", "quanto8": "Optimum Quanto", "hqq8": "HQQ"}


@dataclass(frozen=True, slots=True)
class Row:
    """One codec's line of table 3. Seconds; TTFT is up to the first new token, looking up included."""

    codec: str
    plain_ttft_s: float
    plain_total_s: float
    sky_ttft_s: float
    sky_total_s: float
    tokens_from_sky: int
    prompt_tokens: int
    block_bytes: int
    chunks_per_block: int
    satellites: int
    retransmitted: int
    rms_error: float
    logit_distance: float
    same_tokens: int
    new_tokens: int


class Narrator:
    """Prints each finished step with the time since the start."""

    def __init__(self, quiet: bool) -> None:
        self._began_s = time.perf_counter()
        self._stream = sys.stderr if quiet else sys.stdout

    def say(self, words: str) -> None:
        print(f"[{time.perf_counter() - self._began_s:5.1f} s] {words}", file=self._stream, flush=True)

    def finish(self, seconds: float, sound: bool) -> None:
        verdict = "done" if sound else "NOT as it should be: see above"
        print(f"\n{verdict} in {seconds:.0f} s; the constellation is down again. Try next:")
        print("  skymemory constellation up && skymemory kv put README.md && skymemory kv get README.md -o copy.md")
        print("  skymemory demo --tokens 2048          a longer context: the cache wins by more")
        print("  skymemory layout --rotations 1        where the chunks are, and where they go")


def print_table_3(rows: Sequence[Row]) -> None:
    """The paper's table 3 on this machine."""
    if not rows:
        return
    row = rows[0]
    print(
        f"\nTable 3, here: {row.prompt_tokens} tokens of prompt, {row.new_tokens} generated (seconds)\n"
        f"{'quantization':<16}{'TTFT no KVC':>12}{'TTFT KVC':>10}{'':>7}{'all no KVC':>12}{'all KVC':>9}{'':>7}"
        f"{'block':>10}{'chunks':>8}{'sats':>6}{'resent':>8}{'rms error':>11}{'|Δlogit|':>10}{'same':>7}"
    )
    for row in rows:
        print(
            f"{_NAMES[row.codec]:<16}{row.plain_ttft_s:>12.2f}{row.sky_ttft_s:>10.2f}"
            f"{_change(row.plain_ttft_s, row.sky_ttft_s):>7}{row.plain_total_s:>12.2f}{row.sky_total_s:>9.2f}"
            f"{_change(row.plain_total_s, row.sky_total_s):>7}{format_size(row.block_bytes):>10}"
            f"{row.chunks_per_block:>8}{row.satellites:>6}{row.retransmitted:>8}{row.rms_error:>11.4f}{row.logit_distance:>10.3f}"
            f"{f'{row.same_tokens}/{row.new_tokens}':>7}"
        )
        if row.codec in _PAPER:
            without, with_cache = _PAPER[row.codec]
            print(f"{'  the paper':<16}{'':>29}{without:>12.1f}{with_cache:>9.1f}{_change(without, with_cache):>7}")
    print(
        "rms error: of the codec on a block's keys and values, read back.\n"
        "|Δlogit|: largest difference at the first new token from computing everything at once (in bfloat16 the split\n"
        "of the prefill alone changes rounding); same: leading tokens equal to those without the cache."
    )


def _change(before_s: float, after_s: float) -> str:
    return f"{(after_s / before_s - 1) * 100:+.0f}%"
