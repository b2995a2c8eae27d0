"""Groups of ranks that exchange rows, and references that compute the same without them."""
