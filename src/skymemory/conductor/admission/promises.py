"""Which promise a request would break, by what is estimated of it: the sentences all rules refuse with."""

from __future__ import annotations

from skymemory.conductor.admission.base import Outlook, Refusal

LATER_S = 1.0
"""When to try again, where nothing says when there will be room."""
_LOOKS = 12
"""Ahead, each twice as far as the one before."""


def too_late(ttft_s: float | None, promised_s: float) -> Refusal | None:
    """Its first token would come later than was promised; what is not estimated is taken to be in time."""
    if ttft_s is None or ttft_s <= promised_s:
        return None
    reason = f"its first token would come in {ttft_s:.3g} s; {promised_s:.3g} s are promised"
    return Refusal(reason, max(LATER_S, ttft_s - promised_s), kind="ttft")


def too_slow(tbt_s: float | None, promised_s: float, outlook: Outlook | None, now_s: float) -> Refusal | None:
    """Tokens would come more slowly than was promised, to it or to those who decode beside it."""
    if tbt_s is None or tbt_s <= promised_s:
        return None
    reason = f"tokens would come every {tbt_s * 1000:.4g} ms; {promised_s * 1000:.4g} ms are promised"
    return Refusal(reason, room_in_s(outlook, promised_s, now_s), kind="tbt")


def room_in_s(outlook: Outlook | None, promised_s: float, now_s: float) -> float:
    """Seconds until the decoding servers are believed to keep the promise again, if nothing new came."""
    if outlook is None:
        return LATER_S
    ahead_s = LATER_S
    for _ in range(_LOOKS):
        if outlook.tbt_s(now_s + ahead_s, now_s) <= promised_s:
            break
        ahead_s *= 2
    return ahead_s
