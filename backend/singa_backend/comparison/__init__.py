"""Measure the difference between two values."""
