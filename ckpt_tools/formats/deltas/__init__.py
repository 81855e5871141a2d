"""Versions of a model that store only what changed: the layout that inference engines pull."""
