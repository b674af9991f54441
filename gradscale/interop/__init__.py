"""Saved states of other systems."""
