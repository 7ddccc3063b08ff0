"""What functions of vLLM do to their object, read from their source: for drift.py, which compares it with ours.

self.current_step += 1                    current_step
self.running.append(request)              running.append()
connector = self.connector                (an alias, followed)
connector.update_state_after_alloc(...)   connector.update_state_after_alloc()
request.status = RequestStatus.RUNNING    request.status
self._free(request)                       the effects of _free
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

Methods = Mapping[str, ast.FunctionDef]
MANAGER = "kv_cache_manager"


def tree_of(source: Any) -> Any:  # noqa: ANN401 - a class or function, and its node
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(source))).body
    return tree


def methods_of(kind: type) -> Methods:
    """Return the methods of ``kind`` and of its bases in vLLM, the nearest first."""
    found: dict[str, ast.FunctionDef] = {}
    for base in kind.__mro__:
        if base.__module__.startswith("vllm."):
            own = (one for one in tree_of(base).body if isinstance(one, ast.FunctionDef))
            found = {one.name: one for one in own} | found
    return found


def path_of(node: ast.AST) -> str:
    """Return a.b.c for a chain of attributes and subscripts, and nothing for other expressions."""
    match node:
        case ast.Name():
            return node.id
        case ast.Attribute():
            before = path_of(node.value)
            return before and f"{before}.{node.attr}"
        case ast.Subscript() | ast.Starred():
            return path_of(node.value)
    return ""


def _written(node: ast.AST) -> Iterator[str]:
    """Yield the paths that a statement writes."""
    targets: list[ast.expr] = []
    match node:
        case ast.Assign() | ast.Delete():
            targets = node.targets
        case ast.AugAssign() | ast.AnnAssign() | ast.For() | ast.NamedExpr():
            targets = [node.target]
    for target in targets:
        for part in target.elts if isinstance(target, ast.Tuple) else [target]:
            yield path_of(part)


def _resolved(function: ast.FunctionDef, root: str) -> Callable[[str], str]:
    """Return a function that follows local names for attributes of ``root`` in a path."""
    aliases = {
        node.targets[0].id: path_of(node.value)
        for node in ast.walk(function)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Attribute)
    }

    def resolve(path: str) -> str:
        first, dot, rest = path.partition(".")
        meant = aliases.get(first, "")
        return f"{meant}{dot}{rest}" if meant.startswith(f"{root}.") else path

    return resolve


def effects(function: ast.FunctionDef, methods: Methods, root: str = "self") -> set[str]:
    """Return the effects of ``function`` on ``root``, and on other objects that it names.

    Calls of ``methods`` on ``root`` are followed. Calls of methods on other objects are not effects.
    """
    found, seen = set[str](), set[str]()
    left = [(function, root)]
    while left:
        one, name = left.pop()
        resolve = _resolved(one, name)
        for node in ast.walk(one):
            found.update(resolve(path).removeprefix(f"{name}.") for path in _written(node) if "." in path)
            called = resolve(path_of(node.func)) if isinstance(node, ast.Call) else ""
            if not called.startswith(f"{name}."):
                continue
            called = called.removeprefix(f"{name}.")
            if called not in methods:
                found.add(f"{called}()")
            elif called not in seen:
                seen.add(called)
                left.append((methods[called], "self"))
    return found


def captures(constructor: ast.FunctionDef, parts: tuple[str, ...] = (MANAGER, "coordinator", "block_pool")) -> set[str]:
    """Return the attributes and calls that a constructor hands the cache manager, or one of its ``parts``."""
    found = set[str]()
    for node in ast.walk(constructor):
        if not isinstance(node, ast.Assign | ast.AnnAssign | ast.Expr):
            continue
        inner = {id(one.value) for one in ast.walk(node) if isinstance(one, ast.Attribute)}
        for one in ast.walk(node):
            if id(one) in inner or not isinstance(getattr(one, "ctx", None), ast.Load):
                continue
            if isinstance(one, ast.Attribute) and one.attr in parts and f".{MANAGER}" in f".{path_of(one)}":
                to = node.value.func if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
                names = [f"{path_of(to)}()"] if to is not None else list(_written(node))
                found.update(name.removeprefix("self.") for name in names)
    return found


def reads(package: ModuleType, folders: tuple[str, ...]) -> Mapping[str, str]:
    """Return what modules in ``folders`` of ``package`` read of a cache manager, as a.b.c, each with a file.

    The constructor that makes the manager is left out: it reads vLLM's own.
    """
    found: dict[str, str] = {}
    for folder in folders:
        for file in sorted((Path(str(package.__file__)).parent / folder).rglob("*.py")):
            text = file.read_text("utf-8")
            if MANAGER in text:
                found = dict.fromkeys(_read(ast.parse(text)), file.name) | found
    return found


def _read(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef) and f"self.{MANAGER}" in {
        one for part in ast.walk(node) for one in _written(part)
    }:
        return
    before, of, rest = path_of(node).rpartition(f"{MANAGER}.")
    if isinstance(node, ast.Attribute) and of and (not before or before.endswith(".")):
        yield rest
    for child in ast.iter_child_nodes(node):
        yield from _read(child)
