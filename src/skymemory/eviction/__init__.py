"""Eviction policies: which keys a full memory lets go first, for satellites, memory and disk alike."""
