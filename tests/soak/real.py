"""Minutes of a constellation of processes that are frozen and killed: every read is right or a miss, all books close.

Every second one host process is frozen for a fifth of a second; every 30 s one is killed (``SIGKILL``) and started
again, empty, two seconds later, while the box moves 60 times as fast as the orbits. A killed process takes its books
with it: they are read just before, must close, and what it held then is lost.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.soak.virtual import Outcome, bytes_of

from skymemory.constellation.presets import preset_named
from skymemory.kv.chunk import DEFAULT_CHUNK_BYTES
from skymemory.protocol import ledger
from skymemory.store.constellation import ConstellationStore
from skymemory.testbed.connect import open_constellation
from skymemory.testbed.control import ping_all
from skymemory.testbed.plan import ConstellationPlan, HostShare, local_hosts, make_plan
from skymemory.testbed.run_directory import RunDirectory
from skymemory.testbed.supervisor import start_on_free_ports, stop

_PRESET = "testbed-19x5"
_KEYS = 200
_FREEZE_S = 0.2
_DOWN_S = 2.0


class RealSoak:
    """Build it, then ``run``."""

    def __init__(self, seconds: float, seed: int, kill_every_s: float = 30.0) -> None:
        self.outcome = Outcome()
        self._seconds = seconds
        self._kill_every_s = kill_every_s
        self._dice = random.Random(seed)
        self._written: dict[bytes, tuple[int, int]] = {}
        self._restarted: list[subprocess.Popen[bytes]] = []

    def run(self, tell: Callable[[str], None]) -> Outcome:
        folder = Path(tempfile.mkdtemp(prefix="skymemory-soak-"))
        directory, began = RunDirectory(folder), time.monotonic()
        try:
            plan = start_on_free_ports(
                directory,
                lambda base_port: make_plan(
                    _PRESET, hosts=local_hosts(_PRESET, 5, base_port), delay_scale=0.0, time_scale=60.0,
                    epoch_s=time.time(), memory_per_satellite_bytes=1 << 20,
                ),
                preset_named(_PRESET).torus.size,
            ).plan  # fmt: skip
            store = open_constellation(folder)
            try:
                self._live(plan, directory, store, tell)
            finally:
                store.close()
            self._audit(plan, "the end", whole=True)
        finally:
            stop(directory)
            for process in self._restarted:
                process.wait(5)
            shutil.rmtree(folder, ignore_errors=True)
        self.outcome.seconds = time.monotonic() - began
        return self.outcome

    def _live(
        self, plan: ConstellationPlan, directory: RunDirectory, store: ConstellationStore, tell: Callable[[str], None]
    ) -> None:
        began = time.monotonic()
        freeze_s, kill_s = began + 1.0, began + self._kill_every_s
        thaw: tuple[float, HostShare] | None = None
        dead: tuple[float, HostShare] | None = None
        while (now := time.monotonic()) < began + self._seconds:
            if thaw is not None and now >= thaw[0]:
                self._signal(directory, thaw[1], signal.SIGCONT)
                thaw = None
            if dead is not None and now >= dead[0]:
                self._restarted.append(self._start(directory, dead[1]))
                dead = None
            if thaw is None and now >= kill_s and dead is None:
                host = self._dice.choice(plan.hosts)
                self._audit(plan, f"before {host.name} is killed", dying=host)
                self._signal(directory, host, signal.SIGKILL)
                self.outcome.counted["host processes killed"] += 1
                dead, kill_s = (now + _DOWN_S, host), kill_s + self._kill_every_s
                tell(f"{now - began:.0f} s: {dict(self.outcome.counted)}")
            elif thaw is None and now >= freeze_s:
                host = self._dice.choice([host for host in plan.hosts if dead is None or host != dead[1]])
                self._signal(directory, host, signal.SIGSTOP)
                self.outcome.counted["host processes frozen"] += 1
                thaw, freeze_s = (now + _FREEZE_S, host), now + 1.0
            self._operate(store)
        if thaw is not None:
            self._signal(directory, thaw[1], signal.SIGCONT)
        if dead is not None:
            self._restarted.append(self._start(directory, dead[1]))
        time.sleep(_DOWN_S)

    @staticmethod
    def _signal(directory: RunDirectory, host: HostShare, number: signal.Signals) -> None:
        record = directory.read_record(host.name)
        if record is not None and record.alive:
            os.kill(record.pid, number)

    @staticmethod
    def _start(directory: RunDirectory, host: HostShare) -> subprocess.Popen[bytes]:
        """As an operator would."""
        return subprocess.Popen(
            [sys.executable, "-m", "skymemory.cli.main", "satellite", "--plan", str(directory.plan_path),
             "--host", host.name, "--run-dir", str(directory.path)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    # --- operations ---

    def _operate(self, store: ConstellationStore) -> None:
        dice = self._dice
        name = dice.randrange(_KEYS)
        key = hashlib.sha256(b"%d" % name).digest()
        choice = dice.random()
        if key not in self._written or choice < 0.2:
            number = self._written[key][0] + 1 if key in self._written else 0
            size = 480 * 6144 if name == 0 else random.Random(name).randint(1, 4 * DEFAULT_CHUNK_BYTES)
            self._written[key] = number, size
            ticket = store.prepare_store([(key, bytes_of(key, number, size))])
            stored = store.complete_store(ticket) == [True]
            self.outcome.counted["put: stored" if stored else "put: failed"] += 1
        elif choice < 0.97:
            self._read(store, key)
        else:
            store.delete([key])
            self.outcome.counted["delete: asked"] += 1

    def _read(self, store: ConstellationStore, key: bytes) -> None:
        """Any version that was ever written would be a right answer; the index names the one."""
        ticket = store.prepare_load([key])
        (found,) = store.complete_load(ticket)
        number, size = self._written[key]
        if found is None:
            self.outcome.counted[f"get: {ticket.report.keys[0].reason if ticket.report else 'miss'}"] += 1
        elif any(found == bytes_of(key, version, size) for version in range(number, -1, -1)):
            self.outcome.counted["get: hit"] += 1
        else:
            self.outcome.wrong.append(f"{key.hex()[:12]}, {len(found)} bytes")
        store.release(ticket)

    # --- the books ---

    def _audit(self, plan: ConstellationPlan, when: str, dying: HostShare | None = None, whole: bool = False) -> None:
        """Whoever answers must have books that close; those of the dying are added up as final."""
        answers = {here: found for here, found in ping_all(plan).items() if found is not None}
        gaps = ledger.open_books(answers)
        self.outcome.open_books += [f"{tuple(here)}, {when}: {gap} bytes" for here, gap in gaps.items()]
        if dying is not None:
            final = {here: dict(answers[here]) for here, _ in plan.addresses_of(dying) if here in answers}
            for figures in final.values():
                figures["bytes_lost"] += figures["memory_used_bytes"]
                figures["memory_used_bytes"] = 0
            self._add(final)
        if whole:
            self._add(answers)
            gap = ledger.unaccounted_bytes(self.outcome.books)
            self.outcome.open_books += [f"all together: {gap} bytes"] * (gap != 0)
            silent = plan.torus.size - len(answers)
            self.outcome.counted["satellites silent at the end"] = silent
        self.outcome.counted["audits"] += 1

    def _add(self, figures: dict[object, dict[str, int]]) -> None:
        for name, size in ledger.total(figures).items():
            self.outcome.books[name] = self.outcome.books.get(name, 0) + size
