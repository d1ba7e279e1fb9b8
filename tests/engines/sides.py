"""Processes of other engines, in their own environment (``make test-engines`` prepares it), that answer questions.

A side reads a question a line, as JSON, and prints its answer; the rest of its output is its log.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("SKYMEMORY_ENGINES_VENV", ROOT / ".venv-engines")) / "bin" / "python"
PATIENT = {"ask_deadline": "30s", "load_deadline": "60s", "store_deadline": "60s"}
"""Where a shared machine is slow, that is no fault of the plug-ins."""
_MARK = "answer "
_ANSWER_S = 240.0
"""The first answer waits for imports: 20 s on two cores that do nothing else."""


def answering(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """In a side: until there are no more questions."""
    for line in sys.stdin:
        print(f"\n{_MARK}{json.dumps(answer(json.loads(line)))}", flush=True)


class Side:
    """One process. ``module`` is its name in tests.engines."""

    def __init__(self, module: str, log: Path) -> None:
        quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "LMCACHE_TRACK_USAGE": "false"}
        paths = {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self._path = log
        self._errors = log.open("wb")
        self._process = subprocess.Popen(
            [PYTHON, "-m", f"tests.engines.{module}"],
            cwd=ROOT,
            env={**os.environ, **quiet, **paths},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def ask(self, do: str, store: str, **more: Any) -> dict[str, Any]:
        """``more``: of the engine, or ``options`` of the plug-in."""
        options = {"store": store, "weights": "revision 1", **PATIENT, **more.pop("options", {})}
        question = {"do": do, "options": options, **more}
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        late = threading.Timer(_ANSWER_S, process.kill)
        late.start()
        try:
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
            for line in process.stdout:
                if line.startswith(_MARK):
                    found: dict[str, Any] = json.loads(line.removeprefix(_MARK))
                    return found
                self._errors.write(line.encode())
                self._errors.flush()
        finally:
            late.cancel()
        raise RuntimeError(f"no answer to {question}; its log ends: {self.log()[-2000:]}")

    def log(self) -> str:
        """What it has logged so far."""
        return self._path.read_text("utf-8", "replace")

    def close(self) -> None:
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        process.kill()  # it may still be at its imports
        process.wait()
        process.stdout.close()
        self._errors.close()
