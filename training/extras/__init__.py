"""What only some runs use: other models, wrappers and data, and tools around a run."""
