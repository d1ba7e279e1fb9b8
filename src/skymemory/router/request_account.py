"""One request in the picker's books: entered once, moved where another server takes it, closed once."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from skymemory.conductor.picker import Picker
from skymemory.conductor.request import Decision
from skymemory.router.afterwards import Afterwards


class Booking:
    """Keeps the picker's account right, whatever order things are told in, or left untold.

    Made when the request goes out. Whatever is told twice counts once; ``close`` ends what is still open. The entries
    themselves are made ``after`` answers are out, in order: learning a prompt takes as long as picking for it.
    """

    def __init__(self, picker: Picker, decision: Decision, now_s: float, after: Afterwards | None = None) -> None:
        self._picker = picker
        self._after = Afterwards() if after is None else after
        self.decision = decision
        self._open = True
        self._answered = False
        self._after.do(partial(self._picker.routed, decision, now_s))

    @property
    def waits(self) -> bool:
        """Nothing of the answer has come."""
        return self._open and not self._answered

    def served_by(self, server: str, now_s: float) -> bool:
        """Which server took it. True if it is another than the one that was chosen: that one had it and failed.

        What the other holds of the prompt is not known, so nothing is taken to be matched there.
        """
        if not self.waits or server == self.decision.server:
            return False
        self._after.do(partial(self._picker.failed, self.decision, now_s))
        reasons = (*self.decision.reasons, f"{self.decision.server} did not take it, {server} did")
        rest = tuple(name for name in self.decision.fallbacks if name != server)
        self.decision = replace(
            self.decision,
            server=server,
            fallbacks=rest,
            matched_tokens=0,
            estimated_ttft_s=None,
            reasons=reasons,
        )
        self._after.do(partial(self._picker.routed, self.decision, now_s))
        return True

    def first_byte(self, now_s: float, cached_tokens: int | None = None) -> None:
        if self.waits:
            self._answered = True
            self._after.do(partial(self._picker.succeeded, self.decision, now_s, cached_tokens))

    def ended(self, now_s: float, cached_tokens: int | None, output_tokens: int | None = None) -> None:
        """Its last byte has come, and with it perhaps what the server had cached of the prompt, and how long it is."""
        if self.waits:
            self.first_byte(now_s, cached_tokens)
            cached_tokens = None
        if self._open:
            self._open = False
            self._after.do(partial(self._picker.ended, self.decision, now_s, cached_tokens, output_tokens))

    def failed(self, now_s: float) -> None:
        """No answer, or one that says nothing of the prompt: an error."""
        if self.waits:
            self._open = False
            self._after.do(partial(self._picker.failed, self.decision, now_s))

    def close(self, now_s: float) -> None:
        """Nobody waits for more of it."""
        self.failed(now_s)
        self.ended(now_s, None)
