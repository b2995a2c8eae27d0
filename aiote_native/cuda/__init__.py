"""Memory of NVIDIA GPUs: the driver's functions, found at the first such memory, and queues of copies."""
