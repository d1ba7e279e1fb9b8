"""Load generator: sends a trace's requests to any OpenAI endpoint at their arrival times, and reports the outcomes.

Pure: ``prompts`` (the plan and the prompts' words), ``report`` (outcomes of requests). I/O: ``client``, ``play``.
"""
