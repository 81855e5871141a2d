"""Publishes below a prefix of an object store: attempts, leases, leftovers."""
