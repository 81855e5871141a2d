"""The formats: each reads a catalog from a store, and some write new files.

`registry` detects the format of a path.
"""
