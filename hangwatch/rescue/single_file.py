"""Makes ``hangwatch-rescue.py``: the modules that it needs, as they are, in one file.

Nothing is packed or stripped. Whoever is asked to run the file beside their engine can read it,
and find every module in it under the same name in the repository.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from pprint import pformat
from typing import Any, Final

from hangwatch import __version__

PACKAGES: Final = ("remote", "rescue")
NUMBERS: Final = "hangwatch.rescue.numbers"
LEFT_OUT: Final = frozenset({"hangwatch.rescue.single_file", "hangwatch.remote.text"})
"""Not needed there: this module, and the tables for people."""

HEAD: Final = '''\
#!/usr/bin/env python3
"""Prints what a hung Python engine and its processes do, as one JSON document.

    kubectl exec -i POD -c engine -- python3 - --pid N < hangwatch-rescue.py > d.json

Then, anywhere:

    hangwatch diagnose d.json

Standard library only, Python 3.10 or later, Linux on x86-64. It stops, signals and changes nothing,
writes no file, opens no connection, and ends within 30 seconds. Without --pid it lists what there
is. The document holds command lines and the ends of logs as they are: do not publish it.

Made by tools/make_rescue.py from hangwatch {version}; each module below is the one of that name
in the repository. License: Apache-2.0.
"""

import sys

if sys.version_info < (3, 10):
    sys.exit("hangwatch-rescue: needs Python 3.10 or later, and this is " + sys.version.split()[0])

MODULES = {{}}
'''

TAIL: Final = '''
import importlib.util


class Modules:
    """Finds the modules above, before any that happen to be installed here."""

    def find_spec(self, name, path=None, target=None):
        if name in MODULES:
            return importlib.util.spec_from_loader(name, self, is_package=MODULES[name][0])
        return None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        name = module.__name__
        exec(compile(MODULES[name][1], "hangwatch-rescue.py:" + name, "exec"), module.__dict__)

    def get_source(self, name):
        return MODULES[name][1]


sys.meta_path.insert(0, Modules())
# The folder that we are started in is the engine's; its modules are not ours.
sys.path[:] = [path for path in sys.path if path]

from hangwatch.rescue.program import main

if __name__ == "__main__":
    sys.exit(main())
'''


def compose(state: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return the file.

    Args:
        state: Tables of the engine's numbers to read, as plain data (``remote.probes``).

    Raises:
        ValueError: A module holds what cannot stand in the file as it is.
    """
    modules = {"hangwatch": (True, f'__version__ = "{__version__}"\n')}
    root = resources.files("hangwatch")
    for package in PACKAGES:
        _add(modules, root / package, f"hangwatch.{package}")
    told = pformat(list(state), width=96, sort_dicts=False)
    modules[NUMBERS] = (False, f"PLAIN = {told}\n")
    parts = [HEAD.format(version=__version__)]
    for name, (is_package, source) in modules.items():
        if "'''" in source or not source.isascii() or source.endswith("\\\n"):
            raise ValueError(f"{name} cannot stand in a raw string: it holds ''' or is not ASCII")
        parts.append(f"MODULES[{name!r}] = ({is_package}, r'''{source}''')\n")
    return "\n".join(parts) + TAIL


def _add(modules: dict[str, tuple[bool, str]], folder: Traversable, name: str) -> None:
    source = (folder / "__init__.py").read_text(encoding="utf-8")
    modules[name] = (True, source)
    for entry in sorted(folder.iterdir(), key=lambda each: each.name):
        inner = f"{name}.{entry.name.removesuffix('.py')}"
        if entry.is_dir() and (entry / "__init__.py").is_file():
            _add(modules, entry, inner)
        elif entry.name.endswith(".py") and entry.name != "__init__.py" and inner not in LEFT_OUT:
            modules[inner] = (False, entry.read_text(encoding="utf-8"))
