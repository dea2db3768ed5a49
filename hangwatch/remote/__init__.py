"""Reads CPython structures out of another process."""
