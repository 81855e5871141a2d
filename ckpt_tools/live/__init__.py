"""The state of a running job: who holds what, and moving it to and from checkpoints."""
