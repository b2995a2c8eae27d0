"""Calls, registries and bridges between engines."""
