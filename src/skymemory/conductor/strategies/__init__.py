"""Strategies of routing, one file each, all under the contract of ``base.Scorer``."""
