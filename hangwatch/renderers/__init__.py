"""Reports: one file each, a function from a report to text."""
