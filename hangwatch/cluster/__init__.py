"""The same capture on every node, through Ray."""
