"""An engine's times for a cost model: which prompts and batches are measured (``grid``), and measuring them."""
