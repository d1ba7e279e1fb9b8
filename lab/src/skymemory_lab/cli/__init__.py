"""The verbs that the laboratory adds to the ``skymemory`` command."""
