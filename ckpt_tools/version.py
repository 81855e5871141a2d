"""The version, apart, so that nothing else need be imported to know it."""

__version__ = "0.2.0"
