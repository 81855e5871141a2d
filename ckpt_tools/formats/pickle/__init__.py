"""Pickles: read without running anything in them, and written."""
