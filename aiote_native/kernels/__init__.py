"""Arithmetic on the rows of experts."""
