"""What a person asks for: one file an idea, each a preset of catalog, plan and sink."""
