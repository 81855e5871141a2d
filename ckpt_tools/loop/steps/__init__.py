"""The steps of a run: which one to resume from, which ones stay, and their mirror."""
