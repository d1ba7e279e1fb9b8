"""Load generator: sends a trace's requests to any OpenAI endpoint at their arrival times, and reports the outcomes."""
