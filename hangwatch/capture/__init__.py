"""From a plan to evidence, whatever fails on the way."""
