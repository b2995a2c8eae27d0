"""Network namespaces, cables and switches, to be cut and made slow; a relay between two engines."""
