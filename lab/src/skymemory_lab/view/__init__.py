"""Maps of layouts as text, and drawn figures."""
