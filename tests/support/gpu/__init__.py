"""Memory of GPUs: the stand-in for the driver, a real GPU in its place, and kernels emulated on a CPU."""
