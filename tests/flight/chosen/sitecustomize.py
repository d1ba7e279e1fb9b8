"""`skymemory constellation up` of tests gets ``--satellite $SATELLITES`` (see ``tests.flight.real``)."""

import os
import sys


def _choose(words: list[str], choice: str | None) -> list[str]:
    if choice is None or not {"constellation", "up"} <= set(words) or "--satellite" in words:
        return []
    one_host = "--hosts" in words and words[words.index("--hosts") + 1] == "1"
    real_orbit = any(word.startswith("starlink-") for word in words)
    return [] if real_orbit or (one_host and choice == "mixed") else ["--satellite", choice]


sys.argv += _choose(sys.argv, os.environ.get("SATELLITES"))
