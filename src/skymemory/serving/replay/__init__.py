"""Requests of a trace's shape sent to any OpenAI endpoint at their times, and what came of them.

Pure: ``ask`` (what is sent when), ``prompts`` (its words), ``calibration`` (how many of them are how many tokens),
``sse`` and ``hearing`` (what comes back), ``outcome`` and ``report``. I/O: ``client`` and ``play``.
"""
