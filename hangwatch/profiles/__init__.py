"""What is known of each engine: one file each, data only."""
