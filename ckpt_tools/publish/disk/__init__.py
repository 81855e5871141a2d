"""Publishes to a directory of a disk: stage, commit, lock."""
