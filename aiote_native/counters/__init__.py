"""Counts of immediates, and the waits for them."""
