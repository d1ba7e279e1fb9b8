"""SkyMemory's laboratory: what studies, shows and rivals the product, and a small engine to try it with."""

try:
    import skymemory as _product  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "skymemory":
        raise
    raise ModuleNotFoundError(
        "the laboratory needs the package skymemory of the same checkout or release: install it beside",
        name="skymemory",
    ) from None
