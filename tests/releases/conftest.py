"""The release before PONGs carried a word, taken out of this repository's history, as the other end."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

import pytest

COMMIT = "4768acc"
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Release:
    """One release of the package, by where its sources are."""

    name: str
    sources: Path

    def environment(self, **more: str) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(self.sources), **more}

    def run(self, *words: str, patience_s: float = 120.0, **more: str) -> subprocess.CompletedProcess[str]:
        """``python words`` with this release; raises with what it said where that fails."""
        done = subprocess.run(
            [sys.executable, *words],
            env=self.environment(**more),
            cwd=self.sources.parent,
            capture_output=True,
            text=True,
            timeout=patience_s,
            check=False,
        )
        assert done.returncode == 0, f"{self.name}: {' '.join(words[:6])}\n{done.stdout}{done.stderr}"
        return done


@pytest.fixture(scope="session")
def older(tmp_path_factory: pytest.TempPathFactory) -> Release:
    """It has no compiled helper of its own: its Python twin serves."""
    git = shutil.which("git")
    found = git and subprocess.run([git, "archive", COMMIT, "src"], cwd=ROOT, capture_output=True, check=False)
    if not found or found.returncode:
        pytest.skip(
            f"commit {COMMIT} is not here (no git, a shallow clone, or no repository): no older release to meet"
        )
    folder = tmp_path_factory.mktemp("older")
    with tarfile.open(fileobj=io.BytesIO(found.stdout)) as archive:
        archive.extractall(folder, filter="data")
    release = Release("the older release", folder / "src")
    said = release.run("-c", "import skymemory.protocol.wire as wire; print(wire.__file__, wire.Op.__members__)").stdout
    assert said.startswith(str(folder)) and "UNSUPPORTED" not in said
    return release


@pytest.fixture(scope="session")
def newer() -> Release:
    return Release("this release", ROOT / "src")
