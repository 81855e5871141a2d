"""The version, apart, so that nothing else need be imported to know it."""

__version__ = "0.2.0"
GONE_IN = "0.3"  # the release in which old names of options and verbs end
