"""The state of a training loop: its names, shards, objects, and copies in memory."""
