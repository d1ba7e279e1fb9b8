"""A copy of the tree to make faults in: the checkout itself is never touched."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_NATIVE = Path("src/skymemory/native")
_FLAGS = ("-O1", "-std=c11", "-fPIC", "-w")
_TEST_LIMIT_S = 60
"""Of one test: a fault that makes it hang is found by then."""


class BadBuild(Exception):
    """A fault in C that no compiler takes."""


class Tree:
    """A copy at ``path`` of what git knows of ``checkout``; its tests import its own code."""

    def __init__(self, checkout: Path, path: Path) -> None:
        self.path = path
        self._objects: dict[Path, Path] = {}
        self._compiler = shutil.which("cc")
        self._writes = 0
        self._sound: dict[Path, str] = {}
        """Files as they were when they were first read."""
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=checkout,
            check=True,
            capture_output=True,
        )
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (checkout / name).is_file():
                (path / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(checkout / name, path / name)

    def build(self) -> bool:
        """Compile the native helper, an object for each file, so that a fault costs one of them. False: no compiler."""
        if self._compiler is None:
            return False
        self._objects = {source: source.with_suffix(".o") for source in (self.path / _NATIVE).glob("*.c")}
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(self._compile, self._objects))
        self._link()
        return True

    def read(self, file: Path) -> str:
        return self._sound.setdefault(file, (self.path / file).read_text("utf-8"))

    def write(self, file: Path, text: str) -> None:
        """Raises BadBuild for C that does not compile."""
        path = self.path / file
        path.write_text(text, "utf-8")
        if file.parts[0] == "flight":  # its tests compile what is newer; a fault that does not compile is found here
            if self._sound.get(file) != text:
                self._run(["make", "-s", "-j2", "-C", str(self.path / "flight"), "core"])
            return
        # Bytecode is believed where the source's size and second are the same: so no two writes are of one second.
        self._writes += 1
        os.utime(path, (self._writes, self._writes))
        if path in self._objects:
            self._compile(path)
            self._link()

    def test(self, tests: Sequence[str], limit_s: float) -> tuple[int | None, str]:
        """Pytest's exit code, or None if it did not end in time; and what it said."""
        options = ["-x", "-q", "-m", "not slow or seeded", "-p", "no:cacheprovider", "--tb=no"]
        options += ["-o", f"timeout={_TEST_LIMIT_S}"]
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=self.path,
            env={**os.environ, "PYTHONPATH": f"{self.path / 'src'}{os.pathsep}{self.path / 'lab/src'}"},
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        try:
            said, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return None, f"no end within {limit_s:.0f} s"
        return process.returncode, said

    def remove(self) -> None:
        shutil.rmtree(self.path)
        if sys.pycache_prefix is not None:
            shutil.rmtree(Path(sys.pycache_prefix, *self.path.parts[1:]), ignore_errors=True)

    def _compile(self, source: Path) -> None:
        include = sysconfig.get_path("include")
        self._run([str(self._compiler), *_FLAGS, f"-I{include}", "-c", str(source), "-o", str(self._objects[source])])

    def _link(self) -> None:
        library = self.path / _NATIVE / f"_fast{sysconfig.get_config_var('EXT_SUFFIX')}"
        library.unlink(missing_ok=True)
        self._run([str(self._compiler), "-shared", *map(str, self._objects.values()), "-ldl", "-o", str(library)])

    @staticmethod
    def _run(command: list[str]) -> None:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise BadBuild(done.stderr[-2000:])
