"""A serving cluster from one description: store, prefill and decode instances, router."""
