"""Runs command lines as an installation without extras does: of other packages only numpy, rich and theirs are found.

``python base_install.py FILE``: FILE holds a JSON list of command lines (lists of words). Prints one JSON object for
each: its exit status, and what it wrote. Each runs in a fork, so that none sees what another imported or set.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_BASE = {"skymemory", "skymemory_lab", "numpy", "rich", "markdown_it", "mdurl", "pygments"}
_LIMIT_S = 240.0


class _BaseFinder:
    """Another finder, from which only the standard library and what a plain installation brings are visible."""

    def __init__(self, finder: Any) -> None:
        self._finder = finder

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        top = name.partition(".")[0]
        if top not in _BASE | sys.stdlib_module_names and not top.startswith("_sysconfigdata_"):
            return None
        spec: ModuleSpec | None = self._finder.find_spec(name, path, target)
        return spec

    def find_distributions(self, *context: Any) -> Any:
        return getattr(self._finder, "find_distributions", lambda *_: ())(*context)


def _run(words: Sequence[str], output: int) -> None:
    from skymemory.cli.main import main

    os.setpgid(0, 0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        status = main(words)
    except SystemExit as ended:
        status = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
        status = 70
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _wait(child: int) -> int | None:
    """The exit status; None if the child was killed because it was late."""
    deadline_s = time.monotonic() + _LIMIT_S
    while time.monotonic() < deadline_s:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.killpg(child, 9)
    os.waitpid(child, 0)
    return None


def main(file: str) -> None:
    sys.meta_path[:] = [_BaseFinder(finder) for finder in sys.meta_path]
    import numpy  # noqa: F401  (each fork has both)

    import skymemory.cli.main  # noqa: F401

    with open(file, encoding="utf-8") as lines:
        commands = json.load(lines)
    for words in commands:
        with tempfile.TemporaryFile() as output:
            child = os.fork()
            if child == 0:
                _run(words, output.fileno())
            status = _wait(child)
            output.seek(0)
            print(json.dumps({"status": status, "text": output.read().decode("utf-8", "replace")}))


if __name__ == "__main__":
    main(sys.argv[1])
