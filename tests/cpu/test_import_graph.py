"""What is used lies below its user: no module of the package reaches itself by imports, lazy ones counted."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import tfla_tk

ROOT = Path(tfla_tk.__file__).parents[1]
PLACES = {"tfla_tk": "tfla_tk", "tfla_tk.bench": "bench", "tfla_tk.reference": "reference"}


def modules_of(places: dict[str, Path]) -> dict[str, Path]:
    """The file of every module by its dotted name."""
    found = {}
    for package, folder in places.items():
        for path in folder.rglob("*.py"):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imports_of(name: str, path: Path, modules: dict[str, Path]) -> Iterator[str]:
    """The modules that importing and running a module imports, wherever in it they are named.

    Packages above a module count with it, but for those that the importing module itself is in.
    """
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in run_time_nodes(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            targets = [f"{source}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in targets:
            parts = target.split(".")
            for count in range(1, len(parts) + 1):
                prefix = ".".join(parts[:count])
                if prefix in modules and prefix != name and not f"{name}.".startswith(f"{prefix}."):
                    yield prefix


def run_time_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those that a type checker alone sees."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from run_time_nodes(node)


def cycles(graph: dict[str, set[str]]) -> list[set[str]]:
    """The sets of modules that reach one another."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        stack = [start]
        while stack:
            for target in graph[stack.pop()] - seen:
                seen.add(target)
                stack.append(target)
        return seen

    reach = {name: reached(name) for name in graph}
    found = []
    for name in graph:
        loop = {other for other in reach[name] if name in reach[other]}
        if loop and loop not in found:
            found.append(loop)
    return found


def graph_of(modules: dict[str, Path]) -> dict[str, set[str]]:
    return {name: set(imports_of(name, path, modules)) for name, path in modules.items()}


def test_no_import_cycle() -> None:
    modules = modules_of({name: ROOT / folder for name, folder in PLACES.items()})
    assert {"tfla_tk.core.dispatch", "tfla_tk.bench.compare", "tfla_tk.reference.mlstm"} <= modules.keys()
    graph = graph_of(modules)
    assert "tfla_tk.backends.tk.scalar_gate.forward" in graph["tfla_tk.ops.mlstm"]  # imported in a function
    assert cycles(graph) == []


@pytest.mark.parametrize(
    ("source", "loops"),
    [
        ("import pkg.b", [{"pkg.a", "pkg.b"}]),
        ("def f():\n    from pkg import b", [{"pkg.a", "pkg.b"}]),
        ("from .b import x", [{"pkg.a", "pkg.b"}]),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pkg import b", []),
        ("from pkg import c", []),
        ("from pkg.sub import d", [{"pkg.a", "pkg.b", "pkg.sub"}]),
    ],
    ids=["plain", "lazy", "relative", "for types", "none", "by a package"],
)
def test_a_cycle_is_found(tmp_path: Path, source: str, loops: list[set[str]]) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("__init__", "c", "sub/d"):
        (tmp_path / f"{name}.py").touch()
    (tmp_path / "a.py").write_text(source)
    (tmp_path / "b.py").write_text("from pkg.a import y\n")
    (tmp_path / "sub/__init__.py").write_text("from pkg import b\n")
    assert cycles(graph_of(modules_of({"pkg": tmp_path}))) == loops
