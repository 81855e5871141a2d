"""The commands' operations: one file per verb."""
