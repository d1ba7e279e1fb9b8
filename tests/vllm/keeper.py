"""Runs a command in a process group of its own until it ends, or until standard input does: then the group is killed.

``python -m tests.vllm.keeper COMMAND ...``. vLLM's engine process outlives a parent that is killed; this one does not
let it, even where the test itself is killed and has no time to clean up.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading


def main() -> int:
    process = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)

    def watch() -> None:
        while os.read(0, 4096):
            pass
        kill(process.pid)

    threading.Thread(target=watch, daemon=True).start()
    code = process.wait()
    kill(process.pid)
    return code


def kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
