"""Loads a checkpoint into a live state. Each rank reads the bytes of its own shards."""
