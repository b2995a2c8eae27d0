"""Two engines in memory whose channels die: schedules of failover driven by a seed."""
