"""What can be captured of a process, a node or a log: one file each."""
