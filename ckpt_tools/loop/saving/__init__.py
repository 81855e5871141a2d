"""Saves a live state: the ranks share the work, and one rank commits."""
