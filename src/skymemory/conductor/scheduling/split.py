"""How much of a prompt a server loads, and how much of the same it computes while that is on its way.

A server holds the first ``held`` blocks of a prompt; elsewhere there are the first ``end``. Loading can begin at once,
computing when the server's queue has gone. So it computes from ``held`` on while the back of what is elsewhere comes
(Cake, 2024): the later a token, the more it attends to and the dearer it is to compute, so the front is for computing
and the back for loading, and all that is elsewhere is one or the other.

With the prompt's blocks split at ``split``::

    ready  = wait + compute(held..split)          the front is computed
    rest   = compute(end..)                       what nobody has
    late   = max(0, load(split..end) - ready)     what is still on its way then
    finish = ready + max(late, rest) + min(late, rest) / layers

A server that loads layer by layer computes the rest as the layers come (Mooncake §5.2, ``cost_model.loaded_s``); one
that cannot has ``layers`` = 1. ``finish`` is the greatest of ``ready + rest``, ``(1 - 1/layers)·ready + load/layers +
rest`` and ``load + rest/layers``. ``ready`` is convex in the split and ``load`` linear: so their maximum is convex, and
its least value is found by halving.
"""

from __future__ import annotations

from collections.abc import Callable


def finish_s(ready_s: float, loaded_s: float, rest_s: float, layers: int) -> float:
    """When a prefill ends that has computed its front at ``ready_s``, and its load has come at ``loaded_s``."""
    late_s = loaded_s - ready_s
    if late_s <= 0.0:
        return ready_s + rest_s
    if late_s > rest_s:
        return loaded_s + rest_s / layers
    return ready_s + rest_s + late_s / layers


def best_split(finish_at: Callable[[int], float], held: int, end: int) -> tuple[int, float]:
    """The block from ``held`` to ``end - 1`` where loading best begins, and when the prefill then ends.

    ``finish_at`` gives that end for each of them; it must be convex. Of equal ones the first is taken.
    """
    low, high = held, end - 1
    while low < high:
        middle = (low + high) >> 1
        if finish_at(middle) <= finish_at(middle + 1):
            high = middle
        else:
            low = middle + 1
    return low, finish_at(low)
