"""Installation of SkyMemory: its origin, and the commands that add missing parts.

SkyMemory is on no package index: each command names the checkout or the file of this installation.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).resolve().parent
_SMALL_MODEL = ("skymemory-small-model", "models/small")
_LABORATORY = ("skymemory-lab", "lab")
"""Name and folder, in the checkout, of another distribution."""


def find_checkout() -> Path | None:
    """Return this code's source tree, if any."""
    folder = _PACKAGE.parents[1]
    try:
        text = (folder / "pyproject.toml").read_text(encoding="utf-8")
    except OSError:
        return None
    return folder if _PACKAGE.parent.name == "src" and '\nname = "skymemory"\n' in text else None


def install_command(*extras: str) -> str:
    bracket = f"[{','.join(extras)}]"
    if (checkout := find_checkout()) is not None:
        return f"{_pip()} -e {shlex.quote(f'{checkout}{bracket}')}"
    kind, source = _origin()
    if kind == "url":
        return f"{_pip()} {shlex.quote(f'skymemory{bracket} @ {source}')}"
    if kind == "path" and Path(source).exists():
        return f"{_pip()} {shlex.quote(source + bracket)}"
    return f"{_pip()} {shlex.quote(f'./FILE{bracket}')}, where FILE is {_whose(kind, source)}"


def small_model_command() -> str:
    return _distribution_command(*_SMALL_MODEL)


def laboratory_command() -> str:
    return _distribution_command(*_LABORATORY)


def _distribution_command(name: str, folder: str) -> str:
    if (checkout := find_checkout()) is not None:
        return f"{_pip()} {shlex.quote(str(checkout / folder))}"
    kind, source = _origin()
    if kind == "url" and not source.endswith(".whl"):
        part = "&subdirectory=" if "#" in source else "#subdirectory="
        return f"{_pip()} {shlex.quote(f'{name} @ {source}{part}{folder}')}"
    if kind == "path" and (Path(source) / folder).is_dir():
        return f"{_pip()} {shlex.quote(str(Path(source) / folder))}"
    if kind == "path" and source.endswith(".tar.gz") and Path(source).exists():
        return f"{_pip()} {shlex.quote(f'{name} @ {Path(source).as_uri()}#subdirectory={folder}')}"
    wheel = name.replace("-", "_")
    if kind == "path" and (wheels := _wheels_beside(Path(source), wheel)):
        return f"{_pip()} {shlex.quote(str(wheels[-1]))}"
    return f"{_pip()} ./FILE, where FILE is the wheel {wheel}-….whl, or {folder} of a checkout"


def _wheels_beside(file: Path, name: str) -> list[Path]:
    """Return the wheels called ``name``: those of the same release as ``file``, if there are any."""
    of_release = sorted(file.parent.glob(f"{name}-{file.name.split('-')[1]}-*.whl")) if "-" in file.name else []
    return of_release or sorted(file.parent.glob(f"{name}-*.whl"))


def command_word() -> str:
    """Return how to type ``skymemory`` in this folder: by its path if its environment is not activated."""
    own = Path(sys.executable).parent / "skymemory"
    found = shutil.which("skymemory")
    if (found and Path(found).resolve() == own.resolve()) or not own.is_file():
        return "skymemory"
    return shlex.quote(os.path.relpath(own) if own.is_relative_to(Path.cwd()) else str(own))


def make_command(target: str) -> str:
    """Return the advice to run ``make TARGET``."""
    checkout = find_checkout()
    if checkout is None:
        kind, source = _origin()
        checkout = Path(source) if kind == "path" and (Path(source) / "Makefile").is_file() else None
    if checkout is not None:
        in_checkout = Path.cwd() == checkout
        return f"`make {target}`" if in_checkout else f"`make -C {shlex.quote(str(checkout))} {target}`"
    return f"`make {target}` in a checkout of SkyMemory or its unpacked source distribution (skymemory-….tar.gz)"


def _pip() -> str:
    """Return this environment's install command."""
    python = sys.executable or "python3"
    if find_spec("pip") is None:
        return f"uv pip install --python {shlex.quote(python)}"
    pip = shutil.which("pip")
    return "pip install" if pip and Path(pip).parent == Path(python).parent else f"{shlex.quote(python)} -m pip install"


def _origin() -> tuple[str, str]:
    """Return the installer's record (PEP 610): ``("path", PATH)``, ``("url", URL)``, or ``("", "")``."""
    from importlib import metadata  # imported late: these three take 30 ms, and are needed only for errors
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    try:
        record: Any = json.loads(metadata.distribution("skymemory").read_text("direct_url.json") or "null")
        url = record["url"]
    except (metadata.PackageNotFoundError, ValueError, TypeError, KeyError):
        return "", ""
    parts = urlsplit(url)
    if "vcs_info" in record:
        return "url", f"{record['vcs_info']['vcs']}+{url}@{record['vcs_info']['commit_id']}"
    return ("path", url2pathname(parts.path)) if parts.scheme == "file" else ("url", url)


def _whose(kind: str, source: str) -> str:
    moved = f" ({source} is no longer there)" if kind else ""
    return f"the wheel or checkout that SkyMemory was installed from{moved}"
