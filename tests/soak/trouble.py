"""What befalls a real constellation: each second a satellite is disabled, every half minute a host process is killed.

It is the operator's own doing (`skymemory constellation disable`, `enable`, `revive`), by the functions behind these
commands, in a thread of its own: reads and writes go on meanwhile.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable

from skymemory.constellation.torus import SatelliteId
from skymemory.testbed import control
from skymemory.testbed.plan import ConstellationPlan, HostShare
from skymemory.testbed.run_directory import RunDirectory
from skymemory.testbed.supervisor import revive

DISABLED_S = 2.0
DOWN_S = 2.0


class Trouble(threading.Thread):
    """Runs until ``end``, which raises what went wrong. ``before_kill`` receives a host whose books end now."""

    def __init__(
        self,
        directory: RunDirectory,
        plan: ConstellationPlan,
        dice: random.Random,
        counted: Counter[str],
        before_kill: Callable[[HostShare], None],
        kill_every_s: float,
    ) -> None:
        super().__init__(name="trouble", daemon=True)
        self._directory = directory
        self._plan = plan
        self._dice = dice
        self._counted = counted
        self._before_kill = before_kill
        self._kill_every_s = kill_every_s
        self._over = threading.Event()
        self._disabled: deque[tuple[float, SatelliteId]] = deque()
        self._failure: BaseException | None = None

    def run(self) -> None:
        try:
            began_s = time.monotonic()
            strike_s, kill_s, revive_s = began_s + 1.0, began_s + self._kill_every_s, float("inf")
            while not self._over.wait(max(0.0, min(strike_s, kill_s, revive_s) - time.monotonic())):
                now_s = time.monotonic()
                if now_s >= revive_s:
                    self._counted["host processes started again"] += len(revive(self._directory))
                    revive_s = float("inf")
                elif now_s >= kill_s:
                    self._kill(self._dice.choice(self._plan.hosts))
                    kill_s, revive_s = kill_s + self._kill_every_s, now_s + DOWN_S
                else:
                    self._strike(now_s)
                    strike_s = max(strike_s + 1.0, time.monotonic())
            self._counted["host processes started again"] += len(revive(self._directory))
            control.enable(self._directory, None)
        except BaseException as failure:
            self._failure = failure

    def end(self) -> None:
        """All that was dead is back when this returns."""
        self._over.set()
        self.join()
        if self._failure is not None:
            raise self._failure

    def _strike(self, now_s: float) -> None:
        """One more is disabled; those that were for long enough come back."""
        back = []
        while self._disabled and self._disabled[0][0] <= now_s:
            back.append(self._disabled.popleft()[1])
        if back:
            control.enable(self._directory, back)
            self._counted["satellites enabled"] += len(back)
        dead = {satellite for _, satellite in self._disabled}
        victim = self._dice.choice([one for one in self._plan.torus.satellites() if one not in dead])
        control.disable(self._directory, [victim])
        self._disabled.append((now_s + DISABLED_S, victim))
        self._counted["satellites disabled"] += 1

    def _kill(self, host: HostShare) -> None:
        self._before_kill(host)
        record = self._directory.read_record(host.name)
        if record is not None and record.alive:
            os.kill(record.pid, signal.SIGKILL)
            self._counted["host processes killed"] += 1
            while record.alive:  # else it might be asked to revive a satellite while it dies
                time.sleep(0.01)
