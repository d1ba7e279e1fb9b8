"""Ctrl-C at any time of a verb's life, that of its imports included: one line, 130, and soon."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

SWALLOWING = {
    "by_ignoring": "try: import slow_inner\nexcept BaseException: pass\nimport slow_again",
    "by_another_error": "try: import slow_inner\nexcept BaseException: raise RuntimeError('no class')",
    "by_going_on": "try: import slow_inner\nexcept BaseException: pass",
}
"""What a library does with an interrupt in the middle of its import."""

_LIMIT_S = 60.0


def _ended(command: Sequence[str], ready: str, folder: Path, group: bool = False) -> tuple[int, str, float]:
    """The exit code, what was written, and the seconds from SIGINT, which is sent once ``ready`` is written."""
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    assert process.stdout is not None
    try:
        lines = []
        while ready not in (line := process.stdout.readline()):
            assert line, lines
            lines.append(line)
        began_s = time.monotonic()
        (os.killpg if group else os.kill)(process.pid, signal.SIGINT)
        rest, _ = process.communicate(timeout=_LIMIT_S)
        return process.returncode, rest, time.monotonic() - began_s
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.parametrize("library", SWALLOWING.values(), ids=SWALLOWING)
def test_a_library_that_swallows_an_interrupt_in_its_import_is_left(library: str, tmp_path: Path) -> None:
    (tmp_path / "slow_inner.py").write_text("import time\nprint('loading', flush=True)\ntime.sleep(60)\n")
    (tmp_path / "slow_again.py").write_text("import time\ntime.sleep(60)\n")
    (tmp_path / "library.py").write_text(library)
    program = """
        import sys
        from types import SimpleNamespace
        from skymemory.cli import main as command

        def run(args):
            try:
                import library
                print("goes on")
            finally:
                import json.tool  # a lazy import of what a verb does at its end
                print("ended what was started", flush=True)

        command._module_of = lambda verb: verb
        command._load = lambda verb: SimpleNamespace(add_parser=lambda verbs: verbs.add_parser("try"), run=run)
        sys.exit(command.main(["try"]))
    """
    code, text, took_s = _ended([sys.executable, "-c", textwrap.dedent(program)], "loading", tmp_path)
    assert (code, text) == (130, "ended what was started\nskymemory: interrupted\n")
    assert took_s < 30


def test_an_interrupt_before_the_command_is_loaded_is_one_line(tmp_path: Path) -> None:
    program = """
        import sys, time
        class Slow:
            def find_spec(self, name, path=None, target=None):
                if name == "skymemory":
                    print("importing", flush=True)
                    time.sleep(60)
        sys.meta_path.insert(0, Slow())
        from skymemory_command import main
        sys.exit(main())
    """
    code, text, _ = _ended([sys.executable, "-c", textwrap.dedent(program)], "importing", tmp_path)
    assert (code, text) == (130, "skymemory: interrupted\n")


WORKER = """
import sys, time
from pathlib import Path
if __name__ == "__main__":
    from skymemory_lab.sim.sweeps import sweep
else:
    print("a worker starts", flush=True)
    time.sleep({importing_s})

def cell(number):
    print("a cell runs", flush=True)
    time.sleep(60)

if __name__ == "__main__":
    try:
        sweep(cell, [1, 2], jobs=2)
    except KeyboardInterrupt:
        sys.exit(130)
"""


@pytest.mark.brief(every=3)
@pytest.mark.parametrize("group", [True, False], ids=["terminal", "parent alone"])
@pytest.mark.parametrize(("importing_s", "ready"), [(1.0, "a worker starts"), (0.0, "a cell runs")])
def test_workers_say_nothing_of_an_interrupt(importing_s: float, ready: str, group: bool, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(WORKER.format(importing_s=importing_s))
    code, text, took_s = _ended([sys.executable, "program.py"], ready, tmp_path, group)
    assert code == 130 and "Traceback" not in text and "KeyboardInterrupt" not in text, text
    assert took_s < 30


@pytest.mark.engine
@pytest.mark.slow
def test_engines_that_load_say_nothing_of_an_interrupt(tmp_path: Path) -> None:
    program = """
        import time
        from skymemory_lab.engine import run

        def load(*_):
            print("loading", flush=True)
            time.sleep(60)

        run.run_engine = load
        try:
            run.run_engines(run.EngineSettings(), 2, print)
        except KeyboardInterrupt:  # before the second is started
            pass
        print("ended", flush=True)
    """
    code, text, _ = _ended([sys.executable, "-c", textwrap.dedent(program)], "loading", tmp_path, group=True)
    assert (code, text.replace("loading\n", "")) == (0, "ended\n")
