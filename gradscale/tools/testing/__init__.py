"""Tools for tests, which gradscale.testing offers."""
