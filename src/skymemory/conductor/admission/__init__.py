"""Admission control: which requests are refused under overload."""
