"""The files of a release, in ``dist``: ``make release`` builds them with ``python -m tools.release`` and tries each.

They are built from a copy of what git has. On Linux the wheel gets the manylinux tag that auditwheel finds: that of
this computer's C library, unless it is built in a manylinux image (``cibuildwheel``, set in pyproject.toml).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
MOST_BYTES = {
    "skymemory-*.whl": 2_000_000,
    "skymemory-*.tar.gz": 20_000_000,
    "skymemory_lab-*": 1_000_000,
    "skymemory_small_model-*": 15_000_000,
}


def run(*words: str | Path, cwd: Path = ROOT) -> None:
    """Raises SystemExit if the command fails."""
    done = subprocess.run([sys.executable, "-m", *map(str, words)], cwd=cwd, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))}: ended with {done.returncode}")


def copy_tree(folder: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, listed.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)


def build(folder: Path) -> None:
    """Writes the files to ``DIST``, which is emptied first."""
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    copy_tree(folder / "tree")
    for project in (folder / "tree", folder / "tree" / "lab", folder / "tree" / "models" / "small"):
        run("build", "--outdir", folder / "built", project)
    for file in (folder / "built").iterdir():
        if "-linux_" in file.name:
            run("auditwheel", "repair", "--wheel-dir", DIST, file)
        else:
            shutil.copy2(file, DIST)


def check() -> None:
    """Raises SystemExit for a file that an index would refuse, or that is larger than it should be."""
    files = sorted(DIST.iterdir())
    run("twine", "check", "--strict", *files)
    for wheel in DIST.glob("*.whl"):
        run("check_wheel_contents", wheel)
    for pattern, most in MOST_BYTES.items():
        for file in DIST.glob(pattern):
            if (size := file.stat().st_size) > most:
                raise SystemExit(f"{file.name} has {size} bytes, at most {most} are wanted")
            print(f"{file.name}: {size / 1e6:.2f} MB")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        build(Path(temporary))
    check()
