"""``python -m benchmarks [NAME…]``: run measurements, print Markdown tables; ``--list`` names them.

A benchmark is a module of this package with a ``measure()`` that returns rows: mappings of the same
keys, which become the columns; or several lists of rows by their titles. Its docstring is the
method, and is printed with the tables.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import benchmarks


def names() -> list[str]:
    """Return every benchmark."""
    found = pkgutil.iter_modules(benchmarks.__path__)
    return sorted(info.name for info in found if not info.name.startswith("_"))


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return *rows* as a Markdown table."""
    head = list(rows[0])
    cells = [head, ["---"] * len(head), *([str(row[key]) for key in head] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def machine() -> str:
    """Return what the figures were measured on."""
    model = platform.processor() or platform.machine()
    with Path("/proc/cpuinfo").open(encoding="utf-8") as info:
        for line in info:
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    cores = len(os.sched_getaffinity(0))
    return f"{model}, {cores} cores, Linux {platform.release()}, Python {platform.python_version()}"


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("names", nargs="*", choices=[*names(), []], metavar="NAME")
    parser.add_argument("--list", action="store_true", help="name the benchmarks and end")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(names()))
        return
    print(f"Measured on {machine()}.\n")
    for name in arguments.names or names():
        module = importlib.import_module(f"benchmarks.{name}")
        summary, _, method = (module.__doc__ or "").partition("\n")
        print(f"## {name}\n\n{summary}\n{method.rstrip()}\n")
        found = module.measure()
        for title, rows in found.items() if isinstance(found, Mapping) else [("", found)]:
            print(f"### {title}\n" if title else "")
            print(table(rows), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
