"""The measured engines of `skymemory breakeven`, from the benchmarks' JSON: ``python -m tools.measured_points``."""

from __future__ import annotations

import json
from typing import Any

from skymemory_lab.sim.sky.breakeven import MEASURED_FILE
from tools.benchmark_tables import rows_of

TINYLLAMA_BYTES = 22_528
_SOURCE = "python benchmarks/{0}.py --json docs/benchmarks/{0}.json"


def points() -> list[dict[str, Any]]:
    """In the format ``skymemory-prefill/1``."""

    def point(name: str, device: str, model: str, kv_bytes: int, prefill: list[Any], source: str) -> dict[str, Any]:
        pairs = [[tokens, round(seconds, 4)] for tokens, seconds in sorted(prefill)]
        return {
            "name": name,
            "device": device,
            "model": model,
            "kv_bytes_per_token": kv_bytes,
            "prefill": pairs,
            "source": _SOURCE.format(source),
        }

    tiny = "TinyLlama-1.1B's shape"
    alone = [(row["tokens"], row["without_s"]) for row in rows_of("ttft") if row["delay"] == "off"]
    made = [point(f"own engine, {tiny}, bfloat16", "2 cores", "tinyllama-1.1b", TINYLLAMA_BYTES, alone, "ttft")]
    plain = [
        (row["tokens"], row["plain_s"])
        for row in rows_of("vllm_connector")
        if row["mode"] == "ttft" and row["store"] == "memory"
    ]
    made += [point(f"vLLM 0.32.0, {tiny}", "2 cores", "tinyllama-1.1b", TINYLLAMA_BYTES, plain, "vllm_connector")]
    for engine, name in (("own", "own engine"), ("vllm", "vLLM 0.32.0")):
        row = next(row for row in rows_of("disagg") if row["engine"] == engine and row["part"] == "fit")
        shape = row["cost"]["shape"]
        kv_bytes = 2 * shape["layers"] * shape["kv_heads"] * shape["head_dim"] * shape["value_bytes"]
        whole = [(tokens, seconds) for tokens, cached, seconds, *_ in row["prefills"] if not cached]
        model = f"{shape['layers']} layers, width {shape['width']}"
        layers = model.replace("layers, width", "layers of width")
        made.append(point(f"{name}, {layers}, float32", "2 cores", model, kv_bytes, whole, "disagg"))
    gpu = [row for row in rows_of("accelerator") if row["way"] == "computed"]
    for model in dict.fromkeys(row["model"] for row in gpu):
        its = [row for row in gpu if row["model"] == model]
        prefill = [(row["tokens"], row["ttft_s"]) for row in its]
        name, device = f"transformers, {model}'s shape, bfloat16", its[0]["device"]
        made.append(point(name, device, model, its[0]["kv_bytes_per_token"], prefill, "accelerator"))
    return made


def text() -> str:
    """The file as it should be."""
    lines = ",\n  ".join(json.dumps(point) for point in points())
    return f'{{"format": "skymemory-prefill/1",\n "points": [\n  {lines}\n ]}}\n'


if __name__ == "__main__":
    MEASURED_FILE.write_text(text(), "utf-8")
    print(MEASURED_FILE)
