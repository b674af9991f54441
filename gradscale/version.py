"""The version of gradscale."""

__version__ = "0.1.0"
