"""KV caches of two sides, and the processes and networks that they are moved over."""
