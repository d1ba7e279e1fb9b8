"""Storing KV while the next layer is computed, beside storing it afterwards (figure 7)."""

from __future__ import annotations

from skymemory.conductor.cost_model import LLAMA_70B_8xA800
from skymemory.conductor.cost_model.transfer import network_of, stored_s
from skymemory.sim.mooncake.base import Experiment, Setting, Told

LENGTHS = (8, 16, 32, 64, 128)
"""Thousand tokens."""


def layer_wise(setting: Setting) -> Experiment:
    """By how much storing a prompt's KV lengthens its prefill."""
    cost = LLAMA_70B_8xA800
    network = network_of(cost)
    rows = []
    for thousand in LENGTHS:
        tokens = thousand * 1024
        compute_s, transfer_s = cost.prefill_s(tokens), network.seconds(cost.kv_bytes(tokens))
        visible_s = stored_s(transfer_s, compute_s, cost.shape.layers)
        rows.append((thousand, compute_s, transfer_s * 1e3, visible_s * 1e3, visible_s / transfer_s))
    worst = max(row[4] for row in rows)
    return Experiment(
        name="layer-wise",
        published_as="arXiv figure 7",
        title="Latency of storing KV: after the prefill, and layer by layer within it",
        source="none: lengths alone",
        assumed=(
            f"KV goes over the network at {network.bytes_per_s / 1e9:g} GB/s; half of the machine's speed is reached",
            "the figure's own values are in an image only: shapes are compared",
        ),
        header=("thousand_tokens", "prefill_s", "serial_ms", "layer_wise_ms", "left"),
        rows=tuple(rows),
        told=(
            Told("what layer-wise storing leaves of the serial latency, most", "%", "nearly nothing", 100 * worst,
                 "one layer of 80 has nothing to hide behind", digits=1),
            Told("serial latency, 128k against 8k tokens", "×", "grows with the length",
                 rows[-1][2] / rows[0][2], digits=1),
        ),
    )  # fmt: skip
