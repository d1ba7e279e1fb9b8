"""One process of the routing demo: a verb of ``skymemory`` that ends when its standard input does.

Whoever started it holds the other end: when that process is gone, however it went, this one goes too.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from skymemory.cli.main import main

GRACE_S = 4.0
"""From the end of the input until this process ends without asking its verb."""


def _follow() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_follow, name="follow", daemon=True).start()
    raise SystemExit(main(sys.argv[1:]))
