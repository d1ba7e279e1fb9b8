"""A host arena under kills and stops of its clients and its owner, while all of it is used.

Every value says in each of its parts which key and which write it is of, so that a torn, foreign or overwritten value
is seen by its reader. In the end no room may be lost, and what was stored last must be there.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skymemory.store.host.client import HostStore

CLIENTS, KEYS = 6, 400
BUDGET = "48MiB"
PART = 16
SIZES = (1, 64, 1_000, 4_096, 70_000, 300_000)
_PAUSE_S = (0.02, 0.12)
_STOP_S = (0.02, 0.8)


def key_of(number: int) -> bytes:
    return number.to_bytes(4, "big") * 8


def value_of(number: int, write: int, size_parts: int) -> bytes:
    return (number.to_bytes(8, "big") + write.to_bytes(8, "big")) * size_parts


def is_right(number: int, value: memoryview) -> bool:
    """Every part is of this key and of one write."""
    data = bytes(value)
    return data[:8] == number.to_bytes(8, "big") and data == data[:PART] * (len(data) // PART)


def put_in_place(store: HostStore, values: list[tuple[bytes, bytes]], dice: random.Random) -> list[bool]:
    """Store values in rooms, slowly; some are given up, and still written, as by a device that was not stopped."""
    ticket = store.prepare_rooms([(key, len(value)) for key, value in values])
    given_up = []
    for at, (_, value) in enumerate(values):
        room = ticket.rooms[at]
        if room is None:
            continue
        half = len(value) // 2
        room[:half] = value[:half]
        if dice.random() < 0.2:
            time.sleep(dice.uniform(0.0, 0.05))
        room[half:] = value[half:]
        if dice.random() < 0.2:
            ticket.rooms[at] = None
            given_up.append(room)
    done = store.complete_store(ticket)
    for room in given_up:
        room[:] = b"?" * len(room)
    return done


def use(folder: Path, seed: int) -> None:
    """A client: reads, holds, writes and deletes, and says what is wrong, until it is ended."""
    from skymemory.errors import SkyMemoryError
    from skymemory.store.host.client import HostStore

    dice = random.Random(seed)
    while True:
        try:
            store = HostStore(folder)
            break
        except SkyMemoryError:
            time.sleep(0.05)
    held: list[tuple[int, memoryview]] = []
    reads = writes = 0
    said_s = time.monotonic()
    while True:
        number = dice.randrange(KEYS)
        turn = dice.random()
        if turn < 0.5:
            numbers = [(number + at) % KEYS for at in range(dice.randrange(1, 5))]
            views = store.get_many([key_of(each) for each in numbers])
            for each, view in zip(numbers, views, strict=True):
                if view is not None:
                    reads += 1
                    if not is_right(each, view):
                        print(json.dumps({"wrong": f"key {each}, read"}), flush=True)
                    held.append((each, view))
        elif turn < 0.9:
            items = [((number + at) % KEYS, dice.choice(SIZES)) for at in range(dice.randrange(1, 5))]
            write = dice.randrange(1 << 60)
            values = [(key_of(each), value_of(each, write, size // PART + 1)) for each, size in items]
            writes += (put_in_place(store, values, dice) if turn < 0.7 else store.put_many(values)).count(True)
        elif turn < 0.93:
            store.delete([key_of(number)])
        while len(held) > 40 or (held and dice.random() < 0.5):
            each, view = held.pop(dice.randrange(len(held)))
            if not is_right(each, view):
                print(json.dumps({"wrong": f"key {each}, held"}), flush=True)
        if time.monotonic() > said_s + 0.1:
            print(json.dumps({"reads": reads, "writes": writes}), flush=True)
            reads = writes = 0
            said_s = time.monotonic()


@dataclass(slots=True)
class HostOutcome:
    seed: int
    faults: dict[str, int] = field(default_factory=dict)
    reads: int = 0
    writes: int = 0
    wrong: list[str] = field(default_factory=list)
    lost_bytes: int = 0
    """Of the arena: neither free nor in slots nor of a value, after all clients have ended."""
    found_after_restart: float = 0.0
    """Share of what a client had just stored that another finds after the owner was killed."""
    seconds: float = 0.0

    @property
    def is_sound(self) -> bool:
        return not self.wrong and not self.lost_bytes and self.found_after_restart >= 0.99 and self.reads > 0


class HostSoak:
    def __init__(self, faults: int = 200, owners: int = 20, seed: int = 1) -> None:
        self._faults, self._owners = faults, owners
        self._dice = random.Random(seed)
        self.outcome = HostOutcome(seed)
        self._clients: list[subprocess.Popen[str]] = []
        self._owner: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def run(self, report: Callable[[str], object] = lambda line: None) -> HostOutcome:
        began_s = time.monotonic()
        with ExitStack() as stack:
            self._folder = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="skymemory-soak-", dir="/dev/shm"))
            )
            stack.callback(self._end_all)
            self._start_owner()
            self._clients = [self._start_client() for _ in range(CLIENTS)]
            kinds = ["kill a client", "stop a client"] * (self._faults // 2)
            kinds += ["kill the owner", "replace the owner", "stop the owner"] * (self._owners // 2)
            self._dice.shuffle(kinds)
            for at, kind in enumerate(kinds):
                time.sleep(self._dice.uniform(*_PAUSE_S))
                self._fault(kind)
                self.outcome.faults[kind] = self.outcome.faults.get(kind, 0) + 1
                if at % 20 == 19:
                    report(f"{at + 1} of {len(kinds)} faults, {len(self.outcome.wrong)} wrong")
            self._end()
        self.outcome.seconds = time.monotonic() - began_s
        return self.outcome

    def _start_owner(self) -> None:
        address = f"host://{BUDGET}?at={self._folder}&keep=yes"
        command = [sys.executable, "-m", "skymemory", "store", "serve", address]
        command += ["--listen", f"unix://{self._folder}/redis.sock"]
        self._owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._owner.stdout is not None and self._owner.stdout.readline(), "the owner has not begun"

    def _start_client(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.soak.host", str(self._folder), str(self._dice.randrange(1 << 30))]
        client = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self._hear, args=(client,), daemon=True).start()
        return client

    def _hear(self, client: subprocess.Popen[str]) -> None:
        assert client.stdout is not None
        for line in client.stdout:
            try:
                said = json.loads(line)
            except ValueError:  # it was killed in the middle of a line
                continue
            with self._lock:
                self.outcome.reads += said.get("reads", 0)
                self.outcome.writes += said.get("writes", 0)
                if "wrong" in said:
                    self.outcome.wrong.append(said["wrong"])

    def _fault(self, kind: str) -> None:
        assert self._owner is not None
        if kind.endswith("client"):
            at = self._dice.randrange(CLIENTS)
            victim = self._clients[at]
            if kind == "kill a client":
                self._end_one(victim, signal.SIGKILL)
                self._clients[at] = self._start_client()
                return
            self._stop(victim)
        elif kind == "stop the owner":
            self._stop(self._owner)
        else:
            self._end_one(self._owner, signal.SIGKILL if kind == "kill the owner" else signal.SIGTERM)
            self._start_owner()

    def _stop(self, process: subprocess.Popen[str]) -> None:
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(self._dice.uniform(*_STOP_S))
        os.kill(process.pid, signal.SIGCONT)

    def _end_one(self, process: subprocess.Popen[str], how: signal.Signals) -> None:
        process.send_signal(how)
        process.wait(20)

    def _end(self) -> None:
        """After the last fault: no room is lost, and a restart finds what was stored."""
        from skymemory.store.host.client import HostStore

        for client in self._clients:
            self._end_one(client, signal.SIGKILL)
        with HostStore(self._folder) as store:
            keys = [key_of(10_000 + number) for number in range(200)]
            stored = store.put_many([(key, value_of(7, 7, 5_000)) for key in keys])
            assert self._owner is not None
            self._end_one(self._owner, signal.SIGKILL)
            self._start_owner()
        with HostStore(self._folder) as store:
            found = sum(view is not None and is_right(7, view) for view in store.get_many(keys))
            self.outcome.found_after_restart = found / max(1, stored.count(True))
        with HostStore(self._folder) as store:
            for number in range(KEYS):
                store.delete([key_of(number)])
            store.delete(keys)
            store.put_many([(key_of(1), b"last")])
            store.delete([key_of(1)])
            stats = store.stats()
            self.outcome.lost_bytes = int(stats["arena_bytes"] - stats["free_bytes"] - stats["slot_bytes"])

    def _end_all(self) -> None:
        for process in (*self._clients, self._owner):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()


if __name__ == "__main__":
    use(Path(sys.argv[1]), int(sys.argv[2]))
