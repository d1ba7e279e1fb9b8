"""Who is turned away when there is more to do than can be done in time."""
