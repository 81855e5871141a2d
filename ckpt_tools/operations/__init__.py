"""What a person asks for: one file for each verb."""
