"""Processes: engines in processes of their own, and what a process has open, does when idle, and is interrupted by."""
