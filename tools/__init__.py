"""Tools that are run from the repository and are not part of the package."""
