"""A small FSDP2 training program that uses checkpoints the way users would."""
