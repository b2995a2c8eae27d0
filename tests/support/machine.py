"""How slow the machine is that the tests run on."""

import os

SLOWER = 8 if "RDMA_VM" in os.environ else 1
"""The guest with RDMA devices has one processor, and system calls of microseconds."""
