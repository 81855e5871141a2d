"""The path of every write that has a plan: plan, copy, prove and publish."""
