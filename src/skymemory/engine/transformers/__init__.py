"""KV caches of transformers' models: loaded before a forward pass, stored after it, guarded against changes."""
