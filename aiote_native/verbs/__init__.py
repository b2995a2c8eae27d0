"""libibverbs: opened NICs, memory, and reliable connected queue pairs."""
