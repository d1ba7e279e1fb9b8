"""The ``skymemory`` command: loads a verb, runs it, and prints its errors in one line.

A verb is a module with ``add_parser(subparsers)`` and ``run(args) -> int``: of this folder, or an entry point
``skymemory.verbs`` of another distribution. Only its module is imported, and heavy modules only inside ``run``.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import pkgutil
import re
import sys
import textwrap
from collections.abc import Sequence
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

import skymemory
from skymemory.cli._interrupts import interruptible_imports
from skymemory.cli._moved import moved_hint
from skymemory.cli._options import argument, os_error
from skymemory.cli._output import (
    OutputLost,
    discard_unwritten,
    flush_output,
    is_output_lost,
    prepare_streams,
    print_error,
)
from skymemory.config import suggestion
from skymemory.errors import InvalidInput, MissingExtra, SkyMemoryError, quoted
from skymemory.units import parse_number, parse_whole

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_INVALID_INPUT = 2
EXIT_INTERRUPTED = 130

END_WITH_STDIN = "--end-with-stdin"
"""Option for parent processes: the verb ends when its standard input is closed."""
# Longer than a server needs to close its sockets, shorter than a demo waits before it kills the child.
_GRACE_S = 4.0

_IN_FILE_OF = {"epp": "route", "prefetch": "kv", "satellite": "constellation"}
# Verbs of the distribution ``skymemory-lab``, known here for the hint if it is not installed.
_LABORATORY = frozenset(
    ("breakeven", "cluster", "demo", "figures", "fit", "layout", "optimise", "passes", "replay", "reproduce")
    + ("serve", "shells", "simulate")
)
_OPTIONS_BEFORE_VERB = {"-h", "--help", "--version"}


def verb_names() -> list[str]:
    return sorted({*_own_modules(), *_registered_modules()})


def _own_modules() -> dict[str, str]:
    names = (module.name for module in pkgutil.iter_modules([os.path.dirname(__file__)]))
    files = {name.replace("_", "-"): name for name in names if not name.startswith("_") and name != "main"}
    return {verb: f"skymemory.cli.{name}" for verb, name in {**files, **_IN_FILE_OF}.items()}


@functools.cache
def _registered_modules() -> dict[str, str]:
    """Return the verbs of other distributions whose files are present."""
    from importlib import metadata  # imported late: it takes 30 ms, and our own verbs do without

    points = metadata.entry_points(group="skymemory.verbs")
    return {point.name: point.value for point in points if find_spec(point.value.partition(".")[0]) is not None}


def _module_of(verb: str) -> str | None:
    return _own_modules().get(verb) or _registered_modules().get(verb)


def _load(verb: str) -> ModuleType:
    module = _module_of(verb)
    assert module is not None, verb
    return importlib.import_module(module)


class _Formatter(argparse.HelpFormatter):
    """Help formatter for narrow terminals."""

    def _format_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any) -> str:
        text = super()._format_usage(usage, actions, groups, prefix)
        if all(len(re.sub("\x1b\\[[0-9;]*m", "", line)) <= self._width for line in text.splitlines()):
            return text
        words = ["usage:", self._prog, "[options]"]
        for action in actions:
            if not action.option_strings:
                words.append(self._format_args(action, self._get_default_metavar_for_positional(action)))
        return "\n".join(textwrap.wrap(" ".join(words), self._width, subsequent_indent="  ")) + "\n\n"

    def _format_action_invocation(self, action: argparse.Action) -> str:
        text = super()._format_action_invocation(action)
        room = max(self._width - self._current_indent, 20)
        pieces = re.split("(?<=[,|])", text) if len(text) > room else [text]
        lines = [""]
        for piece in pieces:
            if lines[-1] and len(lines[-1]) + len(piece) > room:
                lines.append("  ")
            lines[-1] += piece
        return ("\n" + " " * self._current_indent).join(lines)


class Parser(argparse.ArgumentParser):
    """Parser whose errors are one line with a suggestion."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"formatter_class": _Formatter, **kwargs})
        # argparse reports a failed ``int`` as "invalid int value"; these parsers say what was expected.
        self.register("type", int, argument(parse_whole))
        self.register("type", float, argument(parse_number))

    def error(self, message: str) -> NoReturn:
        if message.endswith("expected one argument"):
            message += " (one that begins with a dash is written after =, as in --ttl=-1)"
        verb = self.prog.removeprefix("skymemory").strip()
        raise InvalidInput(f"{verb + ': ' if verb else ''}{message}; see `{self.prog} --help`")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            if hint := moved_hint(self.prog.removeprefix("skymemory "), unknown):
                raise InvalidInput(f"{self.prog.removeprefix('skymemory ')}: {hint}")
            word = unknown[0].partition("=")[0]
            options = [option for action in self._actions for option in action.option_strings]
            guess = suggestion(word, options) if word.startswith("--") else ""
            words = " ".join(text if len(text) <= 60 else quoted(text) for text in unknown[:5])
            more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
            self.error(f"unrecognized arguments: {words}{more}{f'; {guess}' if guess.startswith('did') else ''}")
        return known, unknown

    def _print_message(self, message: str, file: Any = None) -> None:
        if message and file is not None:
            file.write(message)  # unlike argparse's, this may raise

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            guess = suggestion(str(value), [str(choice) for choice in action.choices])
            raise argparse.ArgumentError(action, f"there is no {quoted(value)}; {guess}")


def build_parser(verbs: Sequence[str] | None = None) -> argparse.ArgumentParser:
    parser = Parser(
        prog="skymemory",
        description="A KV-cache memory hierarchy for LLM inference that reaches up to satellites.",
        epilog=_epilog() if verbs is None else None,
    )
    parser.add_argument("--version", action="version", version=f"skymemory {skymemory.__version__}")
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb in {_module_of(verb): verb for verb in (verb_names() if verbs is None else verbs)}.values():
        _load(verb).add_parser(subparsers)
    return parser


def _epilog() -> str:
    from skymemory.installation import laboratory_command

    if "demo" in verb_names():
        return "Start with:  skymemory demo --quick"
    return f"The laboratory has more verbs, such as demo, serve and simulate: {laboratory_command()}"


def _check_verb(word: str) -> None:
    if word in _OPTIONS_BEFORE_VERB or _module_of(word) is not None:
        return
    if word.startswith("-"):
        raise InvalidInput(f"no option {word!r} before the verb; {suggestion(word, sorted(_OPTIONS_BEFORE_VERB))}")
    if word in _LABORATORY:
        from skymemory.installation import laboratory_command

        raise MissingExtra(f"the laboratory, which has the verb {word!r}, is not installed: {laboratory_command()}")
    known = sorted({*verb_names(), *_LABORATORY})
    raise InvalidInput(f"{word!r} is not a verb of skymemory; {suggestion(word, known)}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb. Exit code: 0 done, 1 failed, 2 invalid input, 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    started_by_ours = arguments[:1] == [END_WITH_STDIN]
    prepare_streams(read_by_ours=started_by_ours)
    if started_by_ours:
        _end_with_stdin()
        del arguments[0]
    try:
        with interruptible_imports():
            status = _run(arguments)
        flush_output()
        return status
    # InvalidInput first: it is a SkyMemoryError too, and scripts must distinguish 2 (fix the command) from 1 (try
    # again).
    except InvalidInput as error:
        print_error(error)
        return EXIT_INVALID_INPUT
    except SkyMemoryError as error:
        print_error(error)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print_error("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of the output has ended (``| head``)
        return EXIT_OK
    except OSError as error:
        # A full disk, a missing folder, a refused socket: a traceback would explain no more.
        print_error(OutputLost(error) if is_output_lost(error) else os_error(error))
        return EXIT_FAILED
    finally:
        discard_unwritten()


def _run(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:2], "--help"]
    # Only the typed verb's module is loaded: a help page or an error should not wait for all imports.
    if arguments:
        _check_verb(arguments[0])
    is_option = not arguments or arguments[0] in _OPTIONS_BEFORE_VERB
    parser = build_parser(None if is_option else arguments[:1])
    if not arguments:
        parser.print_help()
        return EXIT_INVALID_INPUT
    try:
        args = parser.parse_args(arguments)
    except SystemExit:  # --help and --version
        flush_output()
        raise
    return int(_load(args.verb).run(args))


def _end_with_stdin() -> None:
    import signal
    import threading
    import time

    def follow() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        # SIGTERM, so that servers drain and children are ended; the exit is for a verb that does not react to it.
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_GRACE_S)
        os._exit(1)

    # A daemon thread: it must not keep a verb alive that has ended on its own.
    threading.Thread(target=follow, name="follow", daemon=True).start()


if __name__ == "__main__":
    raise SystemExit(main())
