"""The one path of every write: plan, copy, prove and publish."""
