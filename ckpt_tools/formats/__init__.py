"""The formats: each reads a catalog from a store, and some lay out new files. `registry` finds out
which one a path is.
"""
