"""libfabric, opened at run time: domains, registered memory and endpoints."""
