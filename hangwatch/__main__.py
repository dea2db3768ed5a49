"""``python -m hangwatch``."""

from hangwatch.cli import main

main()
