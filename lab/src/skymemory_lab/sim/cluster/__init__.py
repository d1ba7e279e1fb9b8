"""A serving cluster in virtual time: prefill machines, decode machines, and the storage of their KV."""
