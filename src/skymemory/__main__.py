"""``python -m skymemory``: the same as the ``skymemory`` command."""

from skymemory.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
