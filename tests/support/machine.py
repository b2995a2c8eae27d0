"""How slow the machine is that the tests run on, and how long they may take."""

import os

SLOWER = 8 if "RDMA_VM" in os.environ else 1
"""The guest with RDMA devices has one processor, and system calls of microseconds."""
LONG = "AIOTE_TEST_LONG" in os.environ
"""`make test-all` asks for soaks and measurements at their full length; else they are as short as still tests."""
