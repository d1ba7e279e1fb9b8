"""Simulators and models."""
