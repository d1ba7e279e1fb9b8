"""Where the satellites are: the +GRID torus, orbits and delays, visibility, and constellations by name."""
