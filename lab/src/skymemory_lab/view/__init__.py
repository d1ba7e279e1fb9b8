"""Maps of layouts as text, and the paper's figures drawn with matplotlib."""
