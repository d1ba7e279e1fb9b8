"""The ``skymemory`` command: finds the verbs (one file each beside this one), runs one, answers errors in
one line.

A verb is a module ``cli/<verb>.py`` with ``add_parser(subparsers)`` and ``run(args) -> int``; a file whose
name begins with an underscore is shared by verbs and is none itself. When the first argument names a verb
only that file is imported, so a map is drawn without numpy and a satellite starts without torch; verbs import
what is heavy inside ``run``.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

import skymemory
from skymemory.cli._options import argument
from skymemory.config import suggestion
from skymemory.errors import InvalidInput, SkyMemoryError

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_INVALID_INPUT = 2
EXIT_INTERRUPTED = 130

_OPTIONS_BEFORE_VERB = {"-h", "--help", "--version"}


def verb_names() -> list[str]:
    """Every verb there is, by the names of the files beside this one, sorted."""
    here = [os.path.dirname(__file__)]
    return sorted(
        module.name
        for module in pkgutil.iter_modules(here)
        if module.name != "main" and not module.name.startswith("_")
    )


def _load(verb: str) -> ModuleType:
    return importlib.import_module(f"skymemory.cli.{verb}")


class Parser(argparse.ArgumentParser):
    """Its complaints are our errors, in one line, where argparse prints all options before the one that is wrong."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register("type", int, argument(_whole))
        self.register("type", float, argument(_number))

    def error(self, message: str) -> NoReturn:
        if message.endswith("expected one argument"):
            message += " (one that begins with a dash is written after =, as in --ttl=-1)"
        verb = self.prog.removeprefix("skymemory").strip()
        raise InvalidInput(f"{verb + ': ' if verb else ''}{message}; see `{self.prog} --help`")


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise InvalidInput(f"{text!r}: expected a whole number") from error


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise InvalidInput(f"{text!r}: expected a number") from error


def build_parser(verbs: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """The parser of the whole command, or of only the ``verbs`` named (what one call needs)."""
    parser = Parser(
        prog="skymemory",
        description="A KV-cache memory hierarchy for LLM inference that reaches up to satellites.",
        epilog="Start with:  skymemory demo --quick",
    )
    parser.add_argument("--version", action="version", version=f"skymemory {skymemory.__version__}")
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb in verb_names() if verbs is None else verbs:
        _load(verb).add_parser(subparsers)
    return parser


def _check_verb(word: str, names: Sequence[str]) -> None:
    if word in names or word in _OPTIONS_BEFORE_VERB:
        return
    raise InvalidInput(f"{word!r} is not a verb of skymemory; {suggestion(word, names)}")


def _say(error: SkyMemoryError) -> None:
    print(f"skymemory: {error}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb. Exit code: 0 done, 1 failed, 2 the input was wrong, 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    names = verb_names()
    try:
        if arguments:
            _check_verb(arguments[0], names)
        only = [arguments[0]] if arguments and arguments[0] in names else None
        parser = build_parser(only)
        if not arguments:
            parser.print_help()
            return EXIT_INVALID_INPUT
        args = parser.parse_args(arguments)
        status = _load(args.verb).run(args)
        sys.stdout.flush()
    except InvalidInput as error:
        _say(error)
        return EXIT_INVALID_INPUT
    except SkyMemoryError as error:
        _say(error)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("skymemory: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone (``| head``); keep the interpreter from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except OSError as error:
        # A full disk, a socket the system refuses: nothing of ours to explain, nothing to trace.
        print(f"skymemory: {error}", file=sys.stderr)
        return EXIT_FAILED
    return int(status)


if __name__ == "__main__":
    raise SystemExit(main())
