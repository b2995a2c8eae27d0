"""libfabric, opened at run time, with one module for each kind of its objects."""
