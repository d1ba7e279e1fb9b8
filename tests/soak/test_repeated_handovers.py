"""Why a satellite is handed chunks that it has: on links without faults never; on others once more for a lost ACK."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from tests.soak.terms import Setting
from tests.soak.virtual import VirtualSoak

from skymemory.protocol.satellite.chunks import ChunkService
from skymemory.protocol.wire import ChunkRef, Op

_STILL = Setting(
    days=0.04,
    operations=300,
    full_blocks=3,
    loss=0.0,
    duplicate=0.0,
    reorder=0.0,
    corrupt=0.0,
    deaths_per_day=0.0,
    plane_deaths_per_day=0.0,
    squeezes_per_day=0.0,
)


def _came_again(monkeypatch: pytest.MonkeyPatch, **faults: float) -> tuple[Counter[str], int]:
    """Chunks that came by MIGRATE to where the very same were, by how they had come first; all that came by MIGRATE are
    ``all``. And how many chunks satellites sent again for want of an acknowledgement.
    """
    counted: Counter[str] = Counter()
    came: dict[tuple[int, bytes, int], tuple[object, ...]] = {}
    store_run, store_one = ChunkService.set_run, ChunkService._store_chunk

    def note(service, request, index, ref, payload):
        header = request.header
        name, asked = (id(service), request.key, index), (header.op, header.source, header.request_id)
        if header.op is Op.MIGRATE:
            counted["all"] += 1
            if service._store.shares.get(request.key, {}).get(index) == (ref, payload):
                before = came[name]
                counted["same request" if before == asked else f"{before} before {asked}"] += 1
        came[name] = asked

    def noted_run(service, view, start, opened, now_s):
        chunks = opened[1]
        request = service._get_pending_ack(view, start, chunks[0][0])
        for ref, payload in chunks:
            note(service, request, ChunkRef.unpack(ref).index, ref, payload)
        return store_run(service, view, start, opened, now_s)

    def noted_one(service, request, index, ref, payload, now_s):
        note(service, request, index, ref, payload)
        return store_one(service, request, index, ref, payload, now_s)

    monkeypatch.setattr(ChunkService, "set_run", noted_run)
    monkeypatch.setattr(ChunkService, "_store_chunk", noted_one)
    soak = VirtualSoak(replace(_STILL, **faults))
    outcome = soak.run()
    assert outcome.wrong == [] and outcome.open_books == []
    assert counted["all"] > 2_000
    return counted, sum(machine.handover.retransmitted for machine in soak.sim.satellites.values())


@pytest.mark.slow
@pytest.mark.seeded
def test_without_faults_nothing_is_handed_over_twice(monkeypatch):
    counted, sent_again = _came_again(monkeypatch)
    assert sent_again == 0 and set(counted) == {"all"}


@pytest.mark.brief()
def test_a_lost_acknowledgement_brings_the_same_request_again_and_nothing_else_does(monkeypatch):
    counted, sent_again = _came_again(monkeypatch, loss=0.02)
    assert set(counted) == {"all", "same request"}
    assert 0 < counted["same request"] <= sent_again


@pytest.mark.slow
@pytest.mark.seeded
def test_a_doubled_datagram_comes_twice_without_a_retransmission(monkeypatch):
    counted, sent_again = _came_again(monkeypatch, duplicate=0.02)
    assert sent_again == 0 and set(counted) == {"all", "same request"}
