"""Explanations: one file each, a function from a dossier to findings."""
