"""Peers, their channels, the failover between these, and messages."""
