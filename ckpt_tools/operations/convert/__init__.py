"""Converts any checkpoint into the layout of another framework."""
