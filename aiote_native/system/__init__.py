"""Return codes, forks, clocks, wake-ups, and memory of callers."""
