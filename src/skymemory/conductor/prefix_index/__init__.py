"""Which server holds how much of a prompt: believed from what was sent there, or known from what engines tell."""
