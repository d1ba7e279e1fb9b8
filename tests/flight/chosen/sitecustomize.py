"""Of processes that tests start: `skymemory constellation up` gets ``--satellite $SATELLITES`` (see ``tests.flight.real``)."""

import os
import sys

if "SATELLITES" in os.environ and "constellation" in sys.argv and "up" in sys.argv and "--satellite" not in sys.argv:
    sys.argv += ["--satellite", os.environ["SATELLITES"]]
