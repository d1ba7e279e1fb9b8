"""What holds for all tests: Hypothesis bounds no single example in time, which says more of the machine than of us."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("patient", settings.default, deadline=None)
settings.load_profile("patient")
