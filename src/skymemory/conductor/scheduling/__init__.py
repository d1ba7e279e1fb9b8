"""Prefill and decode scheduling after Mooncake: which server prefills, what it loads, which server decodes."""
