"""Any store as a server that speaks the Redis protocol (RESP2 and RESP3)."""
