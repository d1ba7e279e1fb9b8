"""Says before the set-up whether pip would take torch's CUDA build: ``python -m tools.torch_build CONSTRAINTS``.

Asks pip, which installs nothing. Prints one line, or nothing for a CPU build and for a torch that is installed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec

PAGE = "https://pytorch.org/get-started/locally/"
LIMIT_S = 120


def is_cuda(report: dict[str, list[dict[str, dict[str, str]]]]) -> bool:
    """Whether what pip would install (its ``--report``) has CUDA in it."""
    packages = [each["metadata"] for each in report["install"]]
    torch = [package["version"] for package in packages if package["name"] == "torch"]
    names = [package["name"].lower() for package in packages]
    return any("+cu" in version for version in torch) or any(name.startswith(("nvidia-", "cuda-")) for name in names)


def main(constraints: str) -> None:
    if find_spec("torch") is not None:
        return
    words = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--no-input", "--report", "-"]
    try:
        done = subprocess.run([*words, "-c", constraints, "torch"], capture_output=True, timeout=LIMIT_S, check=True)
        cuda = is_cuda(json.loads(done.stdout))
    except (subprocess.SubprocessError, ValueError, KeyError):
        return  # the installation that follows says what is wrong
    if cuda:
        print(
            "set-up: torch comes with CUDA here, about 3 GB to download; without a GPU stop this and give the CPU "
            f"index of {PAGE}: make TORCH_INDEX=URL"
        )


if __name__ == "__main__":
    main(sys.argv[1])
