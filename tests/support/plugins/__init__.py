"""Plugins of pytest that every test runs under, and what tests of them share."""
