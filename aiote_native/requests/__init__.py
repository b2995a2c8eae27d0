"""Requests: checked, submitted and awaited."""
