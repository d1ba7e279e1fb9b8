"""The ``skymemory`` command from its first line on: Ctrl-C while it is imported ends it as later, in one line.

Outside of the package, since an import of anything in it first runs the package's own ``__init__``.
"""

import sys


def main() -> int:
    """Runs ``skymemory.cli.main``; 130 if interrupted."""
    try:
        from skymemory.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        sys.stderr.write("skymemory: interrupted\n")
        return 130
