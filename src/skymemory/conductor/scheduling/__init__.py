"""KVCache-centric scheduling after Mooncake: which server prefills, what it loads, which one decodes."""
