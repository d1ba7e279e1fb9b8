"""Client (ground host) side of the protocol."""
