"""``python -m skymemory``: the same as the ``skymemory`` command."""

from skymemory_command import main

if __name__ == "__main__":
    raise SystemExit(main())
