"""A real vLLM says of its blocks that the store has them, so that a router knows what was evicted from its memory."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from tests.vllm.server import BLOCK_TOKENS, BLOCKS, PYTHON, Vllm
from tests.vllm.test_connector import daemon, transfer
from tests.vllm.test_real_vllm import SLOT, Listening, a_prompt, listening, ours

from skymemory.store.base import StoreTicket
from skymemory.store.memory import MemoryStore

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not installed: make test-vllm does it"),
]
VALUE_TOKENS = 128
TOKENS = 7 * VALUE_TOKENS + 40
PROMPTS = [a_prompt(number, TOKENS) for number in range(6)]
STORED = 7 * VALUE_TOKENS // BLOCK_TOKENS


class Lossy(MemoryStore):
    """Loses all, and takes nothing more, when it is said to."""

    def __init__(self) -> None:
        super().__init__(1 << 30)
        self._taken: list[bytes] = []
        self._is_lost = False

    def complete_store(self, ticket: StoreTicket) -> list[bool]:
        if self._is_lost:
            return [False] * len(ticket.items)
        self._taken += [key for key, _ in ticket.items]
        return super().complete_store(ticket)

    def lose(self) -> None:
        self._is_lost = True
        self.delete(self._taken)


def test_what_was_evicted_is_known_to_be_in_the_store_and_what_is_lost_there_is_not() -> None:
    assert len(PROMPTS) * TOKENS > 1.5 * BLOCKS * BLOCK_TOKENS

    async def scene(ears: Listening) -> None:
        weight = ears.index.weighted
        for prompt in PROMPTS:
            assert await ears.serve(prompt) == 0
            assert weight(ours(prompt), [SLOT])[0] == len(prompt) // BLOCK_TOKENS, "in vLLM's memory"
        evicted, lost = PROMPTS[:2]
        assert ears.matched(evicted) == STORED and weight(ours(evicted), [SLOT])[0] == STORED / 2, "elsewhere"
        assert await ears.serve(evicted) == 7 * VALUE_TOKENS
        assert weight(ours(evicted), [SLOT])[0] > STORED, "here again"
        assert ears.matched(lost) == STORED
        store.lose()
        for prompt in (lost, *PROMPTS[2:]):
            assert await ears.serve(prompt) == 0
        assert ears.matched(lost) == 0
        assert not ears.feed.errors
        assert ears.feed.counts.unknown_events == ears.feed.counts.unusable_events == 0

    with TemporaryDirectory(prefix="sky-vllm-") as folder, Lossy() as store, daemon(store, Path(folder)) as address:
        vllm = Vllm(Path(folder), "events", "--kv-transfer-config", json.dumps(transfer(address)), ours=True)
        try:
            vllm.start()
            vllm.wait()
            listening(vllm, scene)
        finally:
            vllm.stop()
