"""Words that this project's readers trip over, and what an engineer of the field says instead.

`python -m tools.words [PATH…]` prints each place in sources and pages (`make check` runs it); exit code 1 if any is
found. The CHANGELOG is history and is not looked at; a line that needs such a word (a quotation, the API of another
project) ends in `words: keep`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

INSTEAD = {
    r"told": "report, log, notify, learned, given; a list of events: log",
    r"tells?(?! apart)": "says, reports, shows, notifies",
    r"whoever|whosoever|whomever": "name the role: the caller, the client, a reader",
    r"nobody|no one": "name the role: no client, no caller, nothing",
    r"anybody|everybody|somebody": "name the role: any client, every caller, a user",
    r"for ever": "forever, indefinitely, without a limit",
    r"cannot be meant": "contradictory, invalid",
    r"anew": "again, from scratch, new",
    r"out of nowhere": "say what is missing: CONTINUATION without HEADERS",
    r"beforehand|henceforth|thereof|whereof|hitherto|thereupon": "before, from then on, of it",
    r"latecomers?": "a late message, a stale handover",
    r"whereabouts": "location",
    r"(?:has|have|had) gone by": "has passed, have elapsed",
    r"of no avail|in vain": "without effect, unnecessarily",
    r"to be had": "available",
    r"what (?:is|was) asked for": "the request, the requested keys",
    r"so many (?:bytes|tokens|blocks|seconds|letters|milliseconds|planes|slots)": "a number of, this many",
    r"look-ups?": "lookup",
    r"(?:is|are) no (?:valid|plain|whole|pair|endpoint|origin|path|number|name of)": "is not a, are not a",
    r"(?:has|had|have) it that|lest": "says that; so that … does not",
    r"thus far|as yet|ere": "so far, not yet, before",
    r"gainsay|forthwith|asunder|betimes|withal": "plain English",
}
KEPT = ("--tell-decisions", "tell_decisions", "tells_output", "told_prompt_tokens")
"""Options and metrics that users have set by these names."""
PATTERN = re.compile(
    r"(?<![a-z])(?:" + "|".join(f"(?P<w{at}>{word})" for at, word in enumerate(INSTEAD)) + r")(?![a-z])", re.I
)
SUFFIXES = (".py", ".c", ".h", ".md", ".toml", ".yaml", ".yml", "Makefile")
CHECKED = (
    "src",
    "lab",
    "tests",
    "docs",
    "benchmarks",
    "tools",
    "Makefile",
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
)
HISTORY = ("CHANGELOG.md", "tools/words.py")


def files(paths: list[str]) -> list[str]:
    listed = subprocess.run(["git", "ls-files", "--", *paths], capture_output=True, text=True, check=True).stdout
    return [name for name in listed.splitlines() if name.endswith(SUFFIXES) and name not in HISTORY]


def found(name: str) -> Iterator[str]:
    for number, line in enumerate(Path(name).read_text("utf-8").splitlines(), 1):
        if line.rstrip().endswith("words: keep"):
            continue
        for name_kept in KEPT:
            line = line.replace(name_kept, "")
        for match in PATTERN.finditer(line):
            instead = list(INSTEAD.values())[int((match.lastgroup or "w0")[1:])]
            yield f"{name}:{number}: {match[0]!r}; say instead: {instead}"


def main() -> int:
    lines = [line for name in files(sys.argv[1:] or list(CHECKED)) for line in found(name)]
    print("\n".join(lines) or "no word of the list", file=sys.stderr if lines else sys.stdout)
    return int(bool(lines))


if __name__ == "__main__":
    raise SystemExit(main())
