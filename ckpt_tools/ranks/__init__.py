"""The processes of a job, and how they exchange values."""
