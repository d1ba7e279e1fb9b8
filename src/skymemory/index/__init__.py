"""Which blocks exist, where the LLM runs: the radix index, its journal, and the search when it is lost.
Pure.
"""
