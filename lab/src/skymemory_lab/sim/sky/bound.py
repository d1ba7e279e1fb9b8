"""The least time that any protocol needs for a get or a set: the oracle of every simulation.

The larger of two bounds on payload bytes:

- Per server with n chunks, each ``server_s`` in memory and ``t`` over the path's slowest link: the round trip (over the
  quickest links) + max(n · server_s + t, server_s + n · t).
- Per cut (the gateway's beam, its four links together) and threshold θ: θ + server_s + bytes / rate, of servers with a
  round trip of at least θ.
"""

from __future__ import annotations

import numpy as np

from skymemory_lab.sim.sky.physical import LINKS, Floats, LinkRates, Operation, TransferSetting, Ways


def lower_bound_s(ways: Ways, setting: TransferSetting, rates: LinkRates, operation: Operation = "get") -> Floats:
    """Return the least possible latency at each time of ``ways``, whatever the protocol."""
    # The larger of the module's two bounds. The chunks of a value go to the servers in turn.
    counts = setting.counts(ways.servers)
    used = len(counts)
    size_bits = 8.0 * setting.chunk_bytes * counts
    short_bits = 8.0 * (setting.chunks * setting.chunk_bytes - setting.value_bytes)  # missing in the last chunk
    size_bits[(setting.chunks - 1) % used] -= short_bits
    one_way_s = ways.one_way_s if ways.least_one_way_s is None else ways.least_one_way_s
    round_trip_s, shared, far = 2 * one_way_s[:, :used], ways.shared[:, :used], ways.hops[:, :used] > 0
    beam_bit_s = rates.down_bit_s if operation == "get" else rates.up_bit_s
    # Seconds per bit of the beam, of an inter-satellite link, and of each path's slowest.
    beam_s_bit = 0.0 if beam_bit_s is None or ways.access == "onboard" else 1 / beam_bit_s
    isl_s_bit = 0.0 if rates.isl_bit_s is None else 1 / rates.isl_bit_s
    slowest_s_bit = np.maximum(beam_s_bit, np.where(far, isl_s_bit, 0.0))
    # 1. Each server alone.
    last_bits = size_bits - 8.0 * setting.chunk_bytes * (counts - 1)
    tau_s = setting.server_s
    alone_s = round_trip_s + np.maximum(counts * tau_s + last_bits * slowest_s_bit, tau_s + size_bits * slowest_s_bit)
    least_s: Floats = alone_s.max(axis=1)
    # 2. Each cut: the beam, and the gateway's ``LINKS`` links to other satellites.
    for passing, s_bit in ((shared, beam_s_bit), (shared & far, isl_s_bit / LINKS)):
        if s_bit and passing.any():
            least_s = np.maximum(least_s, tau_s + _cut_s(round_trip_s, np.where(passing, size_bits, 0.0), s_bit))
    return least_s


def _cut_s(round_trip_s: Floats, size_bits: Floats, s_bit: float) -> Floats:
    """Return the largest sum of θ and the time over the cut of the bytes from at least that far away."""
    order = np.argsort(-round_trip_s, axis=1)
    bits = np.take_along_axis(size_bits, order, axis=1)
    theta_s = np.where(bits > 0, np.take_along_axis(round_trip_s, order, axis=1), 0.0)
    end_s: Floats = (theta_s + np.cumsum(bits, axis=1) * s_bit * (bits > 0)).max(axis=1)
    return end_s
