"""Frozen values and protocols: what everything else is said in."""
