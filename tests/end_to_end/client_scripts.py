"""Scripts of clients in environments of their own, which `make test-clients` makes, and what became of their checks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.end_to_end.real_door import Door
from tests.router.processes import ROOT

HERE = Path(__file__).parent / "clients"
PYTHON = ROOT / ".venv-clients/bin/python"
PACKAGES = ROOT / ".venv-clients/node_modules"
PATIENCE_S = 240.0


def became(door: Door, *command: str | Path, cwd: Path = HERE, **more: str) -> dict[str, str]:
    """What a client's script says of its checks; ``more`` variables of its environment."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
        "DOOR_URL": f"{door.url}/v1",
        "DOOR_KEY": door.keys["gold"],
        "DOOR_SMALL_KEY": door.keys["small"],
        "SSL_CERT_FILE": str(door.authority.file),
        "NODE_EXTRA_CA_CERTS": str(door.authority.file),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LANGCHAIN_TRACING_V2": "false",
        "AI_SDK_LOG_WARNINGS": "false",
        "NO_PROXY": "*",
        "PYTHONDONTWRITEBYTECODE": "1",
        **more,
    }
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0 and done.stdout, done.stderr
    reported: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return reported


def became_in_python(door: Door, script: str, **more: str) -> dict[str, str]:
    if not PYTHON.exists():
        pytest.skip("no .venv-clients: make test-clients makes it")
    return became(door, PYTHON, script, **more)


def became_in_javascript(door: Door, script: str, folder: Path, **more: str) -> dict[str, str]:
    """``folder``: an empty one, as node looks for packages beside the script."""
    node = shutil.which("node")
    if node is None or not PACKAGES.exists():
        pytest.skip("no node, or no .venv-clients/node_modules: make test-clients makes them where npm can be had")
    shutil.copy(HERE / script, folder)
    (folder / "node_modules").symlink_to(PACKAGES)
    return became(door, node, script, cwd=folder, **more)


def assert_all_are_ok(reported: dict[str, str], least: int) -> None:
    assert len(reported) >= least
    failed = {name: said for name, said in reported.items() if said != "ok"}
    assert not failed, "\n\n".join(f"{name}\n{said}" for name, said in failed.items())
