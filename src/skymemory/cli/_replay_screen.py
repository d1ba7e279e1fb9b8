"""How a replay goes, in one line that is drawn over: on a terminal only."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from typing import TextIO

from skymemory.serving.replay.ask import Ask
from skymemory.serving.replay.figures import spread
from skymemory.serving.replay.outcome import Outcome, Status
from skymemory.serving.replay.play import Player

_EVERY_S = 0.5
_LATEST = 500
"""Answers whose times are shown: the latest."""


class Progress:
    def __init__(self, stream: TextIO, player: Player, outcomes: Sequence[Outcome], asks: Sequence[Ask]) -> None:
        self._stream = stream
        self._player = player
        self._outcomes = outcomes
        self._asks = asks

    async def follow(self) -> None:
        """Until cancelled; the line is gone then."""
        if not self._stream.isatty():
            return
        try:
            while True:
                width = shutil.get_terminal_size().columns
                self._stream.write(f"\r\x1b[K{self.line()[: width - 1]}")
                self._stream.flush()
                await asyncio.sleep(_EVERY_S)
        finally:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def line(self) -> str:
        latest = self._outcomes[-_LATEST:]
        ttft = spread(one.ttft_s for one in latest if one.status is Status.COMPLETED)
        late = spread(one.late_s for one in latest)
        bad = sum(one.status is not Status.COMPLETED for one in self._outcomes)
        words = (
            f"{max(0.0, self._player.clock()):6.1f} of {self._asks[-1].due_s:.1f} s: {self._player.begun:,} of "
            f"{len(self._asks):,} sent, {self._player.under_way:,} under way, {len(self._outcomes) - bad:,} completed, "
            f"{bad:,} not"
        )
        if ttft.count:
            words += f"; TTFT p50 {ttft.p50:.3f} s, p90 {ttft.p90:.3f} s; late by {late.p90 * 1000:.1f} ms (p90)"
        return words
