"""A host that comes into a constellation asks around how far the box has moved, and how far the clocks are apart."""

from __future__ import annotations

import statistics

from skymemory.protocol.motion import SkyMap
from skymemory.protocol.wire import Op
from skymemory.store.driver import ClientDriver

_ENOUGH = 3
"""Satellites that must have answered: one of them may have a wrong clock."""


def ask_the_clocks(driver: ClientDriver, sky: SkyMap) -> float | None:
    """Let the client hear how several satellites count the moves: an operator may have pushed the box on.

    Asked are the box's centre and its four neighbours, all at once; three answers do. Returns by how many seconds the
    clocks of those that answered are ahead of ours (their median, to within half a round trip); None if none did.
    """
    machine = driver.machine
    with driver.lock:
        centre = sky.centre_at(machine.moves(driver.now_s()))
        asked = [
            machine.ask(Op.PING, b"", satellite, driver.now_s())
            for satellite in dict.fromkeys([centre, *sky.torus.neighbours(centre)])
        ]
        ahead_s: list[float] = []
        for number in asked:
            if len(ahead_s) == _ENOUGH:
                machine.cancel(number)
            elif (finished := driver.run([number])[number]).ok:
                ahead_s.append(finished.report.clock_ahead_s)
    return statistics.median(ahead_s) if ahead_s else None
