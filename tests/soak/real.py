"""Minutes of a constellation of real processes in trouble: every read is right or a miss, and all books close.

Every second one satellite is disabled, and comes back empty two seconds later under the same books; every 30 s a host
process is killed (``SIGKILL``) and started again after two seconds, while the box moves 60 times as fast as the orbits.
A killed process takes its books with it: they are read just before, must close, and what it held then is lost.
"""

from __future__ import annotations

import hashlib
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.protocol.satellite import ledgers
from tests.soak.terms import Outcome, bytes_of
from tests.soak.trouble import Trouble

from skymemory.constellation.presets import preset_named
from skymemory.kv.value import DEFAULT_CHUNK_BYTES
from skymemory.store.sky.store import ConstellationStore
from skymemory.testbed.connect import clock_of, open_constellation
from skymemory.testbed.control import ping_all
from skymemory.testbed.plan import ConstellationPlan, HostShare, local_hosts, make_plan
from skymemory.testbed.run_directory import RunDirectory
from skymemory.testbed.supervisor import start_on_free_ports, stop

_PRESET = "testbed-19x5"
_KEYS = 200
_SETTLE_S = 2.0


class RealSoak:
    """Build it, then ``run``."""

    def __init__(self, seconds: float, seed: int, kill_every_s: float = 30.0) -> None:
        self.outcome = Outcome()
        self._seconds = seconds
        self._kill_every_s = kill_every_s
        self._dice = random.Random(seed)
        self._written: dict[bytes, tuple[int, int]] = {}

    def run(self, report: Callable[[str], None]) -> Outcome:
        folder = Path(tempfile.mkdtemp(prefix="skymemory-soak-"))
        directory, began = RunDirectory(folder), time.monotonic()
        try:
            plan = start_on_free_ports(
                directory,
                lambda ports: make_plan(
                    _PRESET,
                    hosts=local_hosts(_PRESET, 5, ports),
                    delay_scale=0.0,
                    time_scale=60.0,
                    epoch_s=time.time(),
                    memory_per_satellite_bytes=1 << 20,
                ),
                preset_named(_PRESET).torus.size,
            ).plan
            store = open_constellation(folder)
            try:
                self._live(plan, directory, store, report)
            except BaseException:
                for host in plan.hosts:
                    report(f"{host.name} said last: {directory.log_tail(host.name)}")
                raise
            finally:
                store.close()
            self._audit(plan, "the end", whole=True)
            self.outcome.moves = clock_of(plan).moves(time.time())
        finally:
            stop(directory)
            shutil.rmtree(folder, ignore_errors=True)
        self.outcome.seconds = time.monotonic() - began
        return self.outcome

    def _live(
        self, plan: ConstellationPlan, directory: RunDirectory, store: ConstellationStore, report: Callable[[str], None]
    ) -> None:
        def last_words(host: HostShare) -> None:
            self._audit(plan, f"before {host.name} is killed", dying=host)
            report(f"{time.monotonic() - began_s:.0f} s: {dict(self.outcome.counted)}")

        began_s = time.monotonic()
        dice = random.Random(self._dice.random())
        trouble = Trouble(directory, plan, dice, self.outcome.counted, last_words, self._kill_every_s)
        trouble.start()
        try:
            while time.monotonic() < began_s + self._seconds and trouble.is_alive():
                self._operate(store)
        finally:
            trouble.end()
        time.sleep(_SETTLE_S)

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
        """Every host that answers must have books that close; those of the dying are added up as final."""
        answers = {here: found for here, found in ping_all(plan).items() if found is not None}
        gaps = ledgers.open_books(answers)
        self.outcome.open_books += [f"{tuple(here)}, {when}: {gap} bytes" for here, gap in gaps.items()]
        if dying is not None:
            final = {here: dict(answers[here]) for here, _ in plan.addresses_of(dying) if here in answers}
            for figures in final.values():
                figures["bytes_lost"] += figures["memory_used_bytes"]
                figures["memory_used_bytes"] = 0
            self._add(final)
        if whole:
            self._add(answers)
            gap = ledgers.unaccounted_bytes(self.outcome.books)
            self.outcome.open_books += [f"all together: {gap} bytes"] * (gap != 0)
            silent = plan.torus.size - len(answers)
            self.outcome.counted["satellites silent at the end"] = silent
        self.outcome.counted["audits"] += 1

    def _add(self, figures: dict[object, dict[str, int]]) -> None:
        for name, size in ledgers.total(figures).items():
            self.outcome.books[name] = self.outcome.books.get(name, 0) + size
