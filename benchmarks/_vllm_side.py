"""One vLLM for `vllm_connector.py`, in vLLM's environment: carries out orders, a line of JSON each.

`load` (the engine), `ask` (one prompt to its first token), `batch` (many prompts), `reset` (vLLM's own prefix cache is
emptied), `decode` (how long steps take beside loads).
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from typing import Any

from skymemory.cache.patience import ComputeRate
from skymemory.engine.vllm.connector import SkyMemoryConnector

_SETTLED_STEPS = 2
"""Steps not counted after a request came or ended: vLLM was in the midst of one."""


class NoCompute(ComputeRate):
    """Never knows how long computing takes, so that no load seems slower."""

    def seconds(self, tokens: int) -> float | None:
        return None


class LoadsOnly(SkyMemoryConnector):
    """Loads all that the store has, from the front and whatever computing would take: the other half of Cake, alone."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:  # vLLM looks at the names
        super().__init__(vllm_config, role, kv_cache_config)
        for side in (self._scheduler, self._worker):
            if side is not None:
                side._blocks.compute = NoCompute()
        if self._scheduler is not None:
            self._scheduler._cake = None


class Side:
    def __init__(self) -> None:
        self._llm: Any = None
        self._numbers = 0

    def load(self, engine: dict[str, Any], transfer: dict[str, Any] | None) -> dict[str, Any]:
        from vllm.config import KVTransferConfig

        import vllm

        if transfer:
            engine["kv_transfer_config"] = KVTransferConfig(**transfer)
        self._llm = vllm.LLM(**engine)
        return {"vllm": vllm.__version__}

    def ask(self, tokens: list[int]) -> dict[str, Any]:
        began_s = time.perf_counter()
        (answer,) = self._llm.generate({"prompt_token_ids": tokens}, self._sampling(1), use_tqdm=False)
        seconds = time.perf_counter() - began_s
        return {"ttft_s": seconds, "cached": answer.num_cached_tokens, "first": answer.outputs[0].token_ids[0]}

    def batch(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        asked = [{"prompt_token_ids": tokens} for tokens in prompts]
        began_s = time.perf_counter()
        answers = self._llm.generate(asked, self._sampling(max_tokens), use_tqdm=False)
        seconds = time.perf_counter() - began_s
        return {"seconds": seconds, "cached": sum(answer.num_cached_tokens for answer in answers)}

    def reset(self) -> dict[str, Any]:
        """False if a request keeps blocks, for a while after it ended."""
        for _ in range(50):
            if self._llm.reset_prefix_cache():
                return {"reset": True}
            time.sleep(0.1)
        return {"reset": False}

    def decode(self, tokens: list[int], loads: list[list[int]], alone_steps: int, least_steps: int) -> dict[str, Any]:
        """Steps of one request that generates, alone and with another's load under way, in turns. Medians, in s."""
        engine = self._llm.llm_engine
        generating = self._add(tokens, 3000)
        rounds, loaded_tokens = [], []
        self._steps(generating, _SETTLED_STEPS + 1)
        before = self._steps(generating, alone_steps)
        for prompt in loads:
            loading = self._add(prompt, 1)
            beside = self._steps(generating, 10_000, until=loading, cached=loaded_tokens)
            beside = beside[_SETTLED_STEPS:-1]  # the last one also computed the loaded prompt's end
            self._steps(generating, _SETTLED_STEPS)
            after = self._steps(generating, alone_steps)
            if len(beside) >= least_steps:
                alone_s = statistics.median(before + after)
                rounds.append({"alone_s": alone_s, "beside_s": statistics.median(beside), "steps": len(beside)})
            before = after
        engine.abort_request([generating])
        while engine.has_unfinished_requests():
            engine.step()
        return {"rounds": rounds, "cached": loaded_tokens}

    def prefill(self, tokens: list[int], load: list[int] | None) -> dict[str, Any]:
        """Seconds to the first token of ``tokens``; of ``load``, if given, the values are loaded meanwhile."""
        engine, cached = self._llm.llm_engine, None
        loading = self._add(load, 1) if load else ""
        if load:
            time.sleep(0.3)  # it is under way
        began_s = time.perf_counter()
        computing = self._add(tokens, 1)
        seconds, overlapped = 0.0, True
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.request_id == computing:
                    seconds = time.perf_counter() - began_s
                elif output.request_id == loading:
                    cached, overlapped = output.num_cached_tokens, seconds > 0
        return {"ttft_s": seconds, "cached": cached, "overlapped": overlapped}

    def _sampling(self, max_tokens: int) -> Any:
        from vllm import SamplingParams

        return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)

    def _add(self, tokens: list[int], max_tokens: int) -> str:
        from vllm.sampling_params import RequestOutputKind

        self._numbers += 1
        sampling = self._sampling(max_tokens)
        sampling.output_kind = RequestOutputKind.DELTA
        name = f"step {self._numbers}"  # as outputs have it; add_request returns another
        self._llm.llm_engine.add_request(name, {"prompt_token_ids": tokens}, sampling)
        return name

    def _steps(self, request: str, count: int, until: str = "", cached: list[int] | None = None) -> list[float]:
        """Seconds between the tokens of ``request``: ``count`` of them, or until another request is answered."""
        seconds: list[float] = []
        last_s, done = time.perf_counter(), False
        while len(seconds) < count and not done:
            for output in self._llm.llm_engine.step():
                if output.request_id == request:
                    now_s = time.perf_counter()
                    seconds.append(now_s - last_s)
                    last_s = now_s
                elif output.request_id == until:
                    done = True
                    if cached is not None:
                        cached.append(output.num_cached_tokens)
        return seconds


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints there
    side = Side()
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(getattr(side, order.pop("do"))(**order)), file=answers, flush=True)


if __name__ == "__main__":
    main()
