"""Memory of NVIDIA GPUs: the driver's functions, loaded at the first use of such memory, and queues of copies."""
