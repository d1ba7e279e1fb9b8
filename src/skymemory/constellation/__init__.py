"""Positions of satellites: the +GRID torus, orbits and delays, visibility, and constellations by name."""
