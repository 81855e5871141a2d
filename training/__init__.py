"""An FSDP training program to start from, with correct checkpoints.

docs/training.md is its user guide.
"""
