"""Reproduction of the figures of the Cake and Mooncake papers."""
