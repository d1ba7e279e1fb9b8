"""A serving cluster from a single description: store, prefill and decode instances, router."""
