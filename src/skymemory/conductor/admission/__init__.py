"""Admission control: rules that refuse requests under overload."""
