"""Engines of a test's process: opened, connected, loaded in every way, and cut off."""
