"""docs/reference/vllm-interface.md: every method of vLLM's connector interface, and what ours does with it.

    python -m tools.vllm_interface 0.32.0=PATH/base.py 0.33.0=PATH/base.py

PATH: of ``vllm/distributed/kv_transfer/kv_connector/v1`` in each release. A method without words here is an error.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "vllm-interface.md"
CONNECTOR = ROOT / "src/skymemory/engine/vllm/connector.py"
CLASSES = ("KVConnectorBase_V1", "SupportsHMA")

WHAT = {
    "bind_connector_metadata": "loads of the step begin, before the forward",
    "bind_gpu_block_pool": "not needed: block tables are asked of the manager",
    "bind_kv_cache_manager": "kept, for block tables and Cake",
    "build_connector_meta": "which values the step loads and saves",
    "build_connector_worker_meta": "what loads and saves have come to",
    "build_kv_connector_stats": "counters by name",
    "build_prom_metrics": "the counters as `vllm:skymemory_*`",
    "clear_connector_metadata": "nothing of the metadata is kept",
    "finish_forward": "nothing to do: values are copied out by `wait_for_save`",
    "get_block_ids_with_load_errors": "blocks that did not come; with one group of layers and no window",
    "get_external_cache_hit_sources": "all tokens are the store's kind: memory, disk or external",
    "get_finished": "requests whose loads have ended; saves hold no blocks",
    "get_finished_count": "each worker reports for itself",
    "get_handshake_metadata": "none: workers do not speak to each other",
    "get_kv_connector_kv_cache_events": "none: the scheduler says what is stored (`take_events`)",
    "get_kv_connector_stats": "counters since the last report",
    "get_loaded_kv_cache_group_ids": "all groups",
    "get_mem_pool_context": "none: caches are allocated as without the connector",
    "get_num_new_matched_tokens": "how many tokens the store has; loaded beside other steps",
    "get_required_kvcache_layout": "any layout is taken",
    "get_transfer_results": "also the requests of which a load failed, with several groups or windows",
    "handle_preemptions": "nothing to do: values were copied out before the blocks are another's",
    "has_connector_metadata": "as of vLLM",
    "has_pending_block_frees": "none: no block waits for a save",
    "has_pending_push_work": "steps go on while values wait to be saved",
    "on_new_request": "the prompt is hashed",
    "register_finished_partial_tail": "only whole values are kept",
    "register_kv_caches": "copies in and out of the blocks are tried",
    "request_finished": "what another engine may take over; no block is held",
    "request_finished_all_groups": "likewise",
    "requires_kv_delivery": "no: a save that is lost is a later miss",
    "requires_piecewise_for_cudagraph": "no: nothing hangs on layers' hooks",
    "reset_cache": "a generation begins: nothing of before is loaded, saved or shared",
    "reset_capture_state": "nothing to do",
    "restore_kv_caches": "nothing to do: the caches keep their addresses",
    "role": "as of vLLM",
    "save_kv_layer": "nothing: all layers are copied out together",
    "set_host_xfer_buffer_ops": "not needed: copies are the connector's own",
    "set_xfer_handshake_metadata": "none: workers do not speak to each other",
    "set_xfer_handshake_metadata_pp_aware": "likewise",
    "shutdown": "what waits is saved as long as `drain`",
    "start_load_kv": "nothing: loads began with the metadata",
    "supports_divergent_local_hybrid_hits": "no: local hits end where all groups' do",
    "supports_sleep_mode": "yes: the caches keep their addresses, and vLLM resets the connector",
    "take_events": "blocks that the store has: once stored or loaded, until a lookup finds them lost",
    "unregister_kv_caches": "nothing to do: vLLM has drained all transfers",
    "update_connector_output": "rates, failures, and where Cake's two sides meet",
    "update_state_after_alloc": "the load is planned into the request's blocks",
    "wait_for_layer_load": "nothing: a request is scheduled when all layers are there",
    "wait_for_save": "values that the step completed are copied out",
}


def methods(source: Path, classes: tuple[str, ...]) -> set[str]:
    """Public ones of these classes."""
    tree = ast.parse(source.read_text("utf-8"))
    found = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in classes]
    functions = (one for node in found for one in node.body if isinstance(one, ast.FunctionDef))
    return {one.name for one in functions if not one.name.startswith("_")}


def page(releases: dict[str, set[str]]) -> str:
    """Raises SystemExit for a method that ``WHAT`` does not name."""
    ours = methods(CONNECTOR, ("SkyMemoryConnector",))
    every = sorted(set().union(*releases.values()))
    if unnamed := [name for name in every if name not in WHAT]:
        raise SystemExit(f"tools/vllm_interface.py has no words for {', '.join(unnamed)}")
    rows = [
        [
            f"`{name}`",
            *("yes" if name in there else "" for there in releases.values()),
            "ours" if name in ours else "vLLM's",
            WHAT[name],
        ]
        for name in every
    ]
    header = ["method", *(f"vLLM {release}" for release in releases), "whose", "what"]
    return "\n".join(
        (
            "<!-- Generated by: python -m tools.vllm_interface -->",
            "",
            "# vLLM's connector interface",
            "",
            "Every method of `KVConnectorBase_V1` and `SupportsHMA`: in which release it is, whose code runs, and what",
            "comes of it. Only 0.32 was run; of others the interface is compared at start.",
            "",
            *("| " + " | ".join(row) + " |" for row in ([*header], ["---"] * len(header), *rows)),
            "",
        )
    )


def main() -> None:
    given = dict(one.split("=", 1) for one in sys.argv[1:])
    PAGE.write_text(page({release: methods(Path(path), CLASSES) for release, path in given.items()}), "utf-8")


if __name__ == "__main__":
    main()
