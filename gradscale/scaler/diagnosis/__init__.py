"""Diagnosis: which parameter holds inf or NaN, on which rank, and why."""
