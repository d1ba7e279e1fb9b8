"""Further families of the generator, for the routing simulator: situations of a fleet, and published statistics.

At rate 1 each stays below the saturation of eight servers of ``LLAMA_70B_8xA800`` with good routing.

Sources of lengths and arrivals:

- ``azure-code``, ``azure-chat``: quantiles computed from ``data/AzureLLMInferenceTrace_code.csv`` and ``_conv.csv`` of
  github.com/Azure/AzurePublicDataset at b469a11 (11 November 2023; Patel et al., "Splitwise", ISCA 2024). The shape of
  the gaps is that of a Gamma distribution with the traces' variance over mean of requests per second, 13.2 and 1.39.
  The traces hold no prompts, so none are shared; their rates are 2.6 and 5.5 requests per second.
- ``burstgpt``: mean lengths of GPT-4's requests, 763 and 348 tokens, from pull request 13063 of vllm-project/vllm; gaps
  of a Gamma distribution of shape 0.5 as in ``example/profile_server/server.py`` of github.com/HPMLL/BurstGPT at
  e92f533 (Wang et al., "BurstGPT", KDD 2025). The spread of lengths is our choice.
"""

from __future__ import annotations

from collections.abc import Sequence

from skymemory_lab.sim.distributions import Bursts, Lengths, LogNormal, Popularity, QuantileLengths
from skymemory_lab.sim.workload import WORKLOADS, Workload

_SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 0.999, 1.0)
_NO_PAUSE = LogNormal(1, 0.0, 1, 1)
_NO_SYSTEM = LogNormal(0, 0.0, 0, 0)


def _exactly(tokens: int) -> LogNormal:
    return LogNormal(tokens, 0.0, tokens, tokens)


def _between(least: int, most: int) -> QuantileLengths:
    return QuantileLengths(((0.0, least), (1.0, most)))


def _quantiles(values: Sequence[float]) -> QuantileLengths:
    return QuantileLengths(tuple(zip(_SHARES, values, strict=True)))


def _independent(name: str, rate_per_s: float, gap_shape: float, prompt: Lengths, answer: Lengths) -> Workload:
    return Workload(
        name=name,
        conversations_per_s=rate_per_s,
        gap_shape=gap_shape,
        tenants=Popularity(1, 0.0),
        system=_NO_SYSTEM,
        question=prompt,
        goes_on=0.0,
        message=_exactly(1),
        pause=_NO_PAUSE,
        answer=answer,
        curt_share=0.0,
    )


SHARED_PROMPT = Workload(
    name="shared-prompt",
    conversations_per_s=14.0,
    tenants=Popularity(1, 0.0),
    system=_exactly(3_000),
    question=_between(100, 400),
    goes_on=0.0,
    message=_exactly(1),
    pause=_NO_PAUSE,
    answer=_between(300, 900),
    curt_share=0.0,
)
"""One system prompt, short questions, long answers."""
SESSIONS = Workload(
    name="sessions",
    conversations_per_s=0.0,
    sessions=40,
    tenants=Popularity(1, 0.0),
    system=_exactly(3_000),
    question=_between(500, 1_500),
    goes_on=1.0,
    message=_between(500, 1_500),
    pause=LogNormal(12, 0.5, 9, 120),
    answer=_between(50, 200),
    curt_share=0.0,
)
"""Agents whose contexts grow, with one system prompt, on a fleet that is idle otherwise; meant for small caches."""
BURSTS = Workload(
    name="bursts",
    conversations_per_s=10.0,
    bursts=Bursts(times=20.0, lasts_s=2.0, every_s=100.0),
    tenants=Popularity(24, 1.0),
    system=LogNormal(2_000, 0.5, 512, 8_000),
    question=LogNormal(500, 0.8, 50, 4_000),
    goes_on=0.3,
    message=LogNormal(150, 0.8, 5, 2_000),
    pause=LogNormal(40, 0.6, 5, 300),
    answer=LogNormal(200, 0.5, 20, 1_000),
    curt_share=0.05,
)
"""Chats of which two fifths begin within 2 s of every 100 s."""
AZURE_CODE = _independent(
    "azure-code",
    20.0,
    1 / 13.2,
    _quantiles((3, 147, 386, 770, 1_075, 1_469, 1_909, 2_433, 3_192, 5_188, 7_303, 7_436, 7_437, 7_437)),
    _quantiles((6, 7, 8, 9, 11, 13, 16, 20, 29, 55, 90, 251, 825, 1_899)),
)
AZURE_CHAT = _independent(
    "azure-chat",
    28.0,
    1 / 1.39,
    _quantiles((2, 207, 387, 403, 703, 1_020, 1_071, 1_130, 1_315, 2_735, 4_083, 4_142, 6_179, 14_050)),
    _quantiles((7, 54, 77, 91, 103, 129, 177, 384, 400, 424, 451, 601, 954, 1_000)),
)
BURSTGPT = _independent("burstgpt", 25.0, 0.5, LogNormal(463, 1.0, 10, 8_000), LogNormal(253, 0.8, 5, 2_000))
FAMILIES = WORKLOADS | {
    workload.name: workload for workload in (SHARED_PROMPT, SESSIONS, BURSTS, AZURE_CODE, AZURE_CHAT, BURSTGPT)
}
