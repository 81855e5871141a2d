"""An FSDP training program to start from, with checkpoints done right. docs/training.md is for its
users.
"""
