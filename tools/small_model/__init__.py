"""Train the small model that the package ships: `python -m tools.small_model`."""
