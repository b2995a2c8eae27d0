"""The simulated network: NICs, memory and endpoints of one process."""
