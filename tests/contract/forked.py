"""Work in a forked child, for tests of what a fork must not share."""

from __future__ import annotations

import json
import os
import select
import signal
import traceback
from collections.abc import Callable
from typing import Any


def in_child(work: Callable[[], Any], meanwhile: Callable[[], object] = lambda: None, limit_s: int = 20) -> Any:
    """What ``work`` gives in a forked child (as JSON has it), or the text of what it raised; ``meanwhile`` is called
    here again and again until then, and once afterwards. A child that hangs is killed after ``limit_s``, which fails.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(limit_s)
            try:
                said = json.dumps(work())
            except BaseException:
                said = json.dumps(traceback.format_exc())
            os.write(writing, said.encode())
        finally:
            os._exit(0)
    os.close(writing)
    try:
        while not select.select([reading], [], [], 0)[0]:
            meanwhile()
        said = b"".join(iter(lambda: os.read(reading, 1 << 16), b""))
    finally:
        os.close(reading)
        os.waitpid(child, 0)
    assert said, "the child hung, and was killed"
    meanwhile()
    return json.loads(said)
