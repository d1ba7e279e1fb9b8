"""What the simulator is to reach: an hour of a real service in seconds, on one core, in little memory."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from skymemory.sim.cluster.run import run_cluster
from skymemory.sim.cluster.setup import ClusterSetup
from skymemory.sim.workload import CONVERSATIONS, generate

MOST_S, MOST_BYTES = 6.0, 500e6
SLACK = 3.0
"""Of time: machines that run tests are slow and busy."""


@pytest.mark.slow
def test_an_hour_of_conversations_with_every_step_takes_seconds() -> None:
    requests = generate(CONVERSATIONS, 3_537.0, seed=1)
    begun_s = time.process_time()
    run = run_cluster(requests, ClusterSetup(), "kvcache-centric")
    took_s = time.process_time() - begun_s
    assert sum(run.gap_tokens) == sum(one.output_tokens - 1 for one in run.outcomes)
    assert took_s * 12_031 / len(requests) < MOST_S * SLACK


@pytest.mark.slow
def test_its_memory_is_bounded() -> None:
    code = (
        "import resource\n"
        "from skymemory.sim.cluster.run import run_cluster\n"
        "from skymemory.sim.workload import CONVERSATIONS, generate\n"
        "run_cluster(generate(CONVERSATIONS, 3537.0, seed=1), None, 'kvcache-centric')\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=110, env=environment
    )
    kib = 1 if sys.platform == "darwin" else 1024
    assert int(ran.stdout) * kib < MOST_BYTES
