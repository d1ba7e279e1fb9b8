"""What people look at: maps of the layouts as text, and the paper's figures drawn with matplotlib."""
