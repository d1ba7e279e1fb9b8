"""The command without a process of its own, for tests that are about the processes which it starts and stops."""

from __future__ import annotations

import contextlib
import io

from skymemory.cli.main import main


def skymemory(*words: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(list(words))
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 2
    return code, out.getvalue(), err.getvalue()
