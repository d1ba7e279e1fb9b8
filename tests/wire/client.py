"""A client on the near computer: `python -m tests.wire.client RUN_DIR` does what it reads, a JSON object a line.

``{"do": "put" | "get", "names": [...], "size": bytes}`` is answered by ``[seconds, [stored or right, …], [why, …]]``.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import time
from pathlib import Path

from skymemory.testbed.connect import open_constellation


def key_of(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def value_of(name: str, size_bytes: int) -> bytes:
    return random.Random(name).randbytes(size_bytes)


def main() -> None:
    with open_constellation(Path(sys.argv[1])) as store:
        print(json.dumps(True), flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            values = {key_of(name): value_of(name, asked["size"]) for name in asked["names"]}
            done: list[bool | None] = []
            why: list[str | None] = []
            began_s = time.monotonic()
            for key, value in values.items():
                if asked["do"] == "put":
                    storing = store.prepare_store([(key, value)])
                    done.append(store.complete_store(storing) == [True])
                    why.append(storing.reason)
                    continue
                ticket = store.prepare_load([key])
                (found,) = store.complete_load(ticket)
                done.append(None if found is None else found == value)
                why.append(ticket.report.keys[0].reason if ticket.report else None)
                store.release(ticket)
            print(json.dumps([time.monotonic() - began_s, done, why]), flush=True)


if __name__ == "__main__":
    main()
