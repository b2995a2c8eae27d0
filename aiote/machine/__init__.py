"""The kernel's facts about this machine: its NICs, GPUs, NUMA nodes, RDMA ports and addresses.

Reading never raises for a fact that is missing. This package must not know rails, engines or libraries of NICs. What is
good or bad about a machine is for `aiote.diagnosis` to say.
"""
