"""Destinations: an attempt, its staging directory, and the commit that makes it visible."""
