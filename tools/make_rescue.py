"""Writes ``dist/hangwatch-rescue.py``: ``just rescue``.

It is not committed: every change of ``remote/`` would have to be made twice, and a copy that is
out of date is worse than none. ``hangwatch rescue`` prints it, the documentation carries it for
those who have nothing but ``curl``, and a release may attach what this writes.
"""

from pathlib import Path

from hangwatch.cli.rescue import program

if __name__ == "__main__":
    path = Path(__file__).parents[1] / "dist" / "hangwatch-rescue.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(program(), encoding="ascii")
    print(f"{path}: {path.stat().st_size} bytes")
