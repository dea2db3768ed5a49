"""What the reference says is what the code does."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import hangwatch

PACKAGE = Path(hangwatch.__file__).parent
VERDICTS = PACKAGE.parent / "docs" / "reference" / "verdicts.md"


def constants(tree: ast.Module) -> dict[str, str]:
    """Return the texts that a module names at its top."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name) and isinstance(node.value.value, str):
                    found[target.id] = node.value.value
    return found


def causes(tree: ast.Module, named: dict[str, dict[str, str]]) -> Iterator[str]:
    """Yield every cause that a module gives: by keyword, by name, or from ``cause_of``."""
    own = constants(tree)
    values: list[ast.expr | None] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "cause":
            values.append(node.value)
        elif isinstance(node, ast.FunctionDef) and node.name == "cause_of":
            values += [each.value for each in ast.walk(node) if isinstance(each, ast.Return)]
        elif isinstance(node, ast.Constant) and str(node.value).startswith("not-a-hang:"):
            values.append(node)
    for value in values:
        for part in ast.walk(value) if value is not None else ():
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                yield part.value
            elif isinstance(part, ast.Name):
                yield own.get(part.id, "")
            elif isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name):
                yield named.get(part.value.id, {}).get(part.attr, "")


def test_every_cause_is_in_the_reference_and_every_one_there_is_given():
    paths = [
        path
        for path in PACKAGE.rglob("*.py")
        if not {"lab", "remote"} & set(path.relative_to(PACKAGE).parts)
    ]
    trees = {path.stem: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(paths)}
    named = {stem: constants(tree) for stem, tree in trees.items()}
    given = {
        cause
        for path in paths
        for cause in causes(ast.parse(path.read_text(encoding="utf-8")), named)
        if re.fullmatch(r"[a-z]+(-[a-z]+)*(:[a-z-]+)?", cause)
    }
    table = VERDICTS.read_text(encoding="utf-8").partition("## Causes")[2].partition("\n## ")[0]

    assert sorted(re.findall(r"^\| `([^`]+)`", table, re.MULTILINE)) == sorted(given)
