"""libfabric, opened at run time: one module for each of its objects."""
