"""SkyMemory's laboratory: what studies, shows and rivals the product, and a small engine to try it with."""
