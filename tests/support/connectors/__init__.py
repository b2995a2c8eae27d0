"""Stand-ins for what the connectors' hosts offer, and senders and receivers of updates."""
