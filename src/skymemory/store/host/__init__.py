"""Host tier: values in memory that all processes of a computer share, and an owner that keeps its books."""
