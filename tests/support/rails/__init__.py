"""Rails without engines: rail sets driven by hand, raw frames, shared memory, and recorded hosts."""
