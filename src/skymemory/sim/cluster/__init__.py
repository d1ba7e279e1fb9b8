"""A serving cluster in virtual time: machines that prefill, machines that decode, and what keeps their KV."""
