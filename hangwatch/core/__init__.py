"""Decisions: pure functions of values. No clock, no file, no process."""
