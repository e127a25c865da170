"""What a vLLM release says of its interfaces, read from its source without importing it.

Owns the way from a folder or a wheel to a small table: a symbol (`module:Class` or
`module:function`) to its members, each in one line. Only names and parameters; nothing of vLLM's
code is kept. Does not own which symbols matter (`surface.py`).

A member's line is one of:

    (request, num_computed_tokens, limit=)   a method without its self; `=` marks a default
    class (vllm_config)                      a class method; `static (…)` likewise
    abstract (request)                       a method that has to be overridden
    property                                 read without a call
    attribute                                a field, a constant, an enum's member, or set on self
    calls a, b, c                            what a function calls, in the order of its source
"""

from __future__ import annotations

import ast
import re
import zipfile
from pathlib import Path
from typing import Final

VERSION_FILES: Final = "vllm/_version.py"
_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)

Members = dict[str, str]


class Sources:
    """The Python files of one vLLM: an installed package, an unpacked folder, or a wheel.

    Args:
        place: a folder that holds `vllm/`, or a `.whl` file.
    """

    def __init__(self, place: Path) -> None:
        self._folder = None if place.suffix == ".whl" else place
        self._wheel = zipfile.ZipFile(place) if place.suffix == ".whl" else None
        self._trees: dict[str, ast.Module | None] = {}

    @property
    def version(self) -> str:
        """The release, without what names its build (`0.32.0`, not `0.32.0+cpu`)."""
        text = self._text(VERSION_FILES) or ""
        found = re.search(r"^__version__\s*=\s*version\s*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
        assert found, f"{VERSION_FILES} does not say which vLLM this is"
        return found.group(1).partition("+")[0]

    def _text(self, path: str) -> str | None:
        if self._wheel is not None:
            if path not in self._wheel.namelist():
                return None
            return self._wheel.read(path).decode()
        assert self._folder is not None
        file = self._folder / path
        return file.read_text() if file.is_file() else None

    def module(self, name: str) -> ast.Module | None:
        """The syntax tree of a module, or None where there is no such module."""
        if name not in self._trees:
            stem = name.replace(".", "/")
            text = self._text(f"{stem}.py") or self._text(f"{stem}/__init__.py")
            self._trees[name] = None if text is None else ast.parse(text)
        return self._trees[name]

    def members(self, symbol: str) -> Members | None:
        """The members of `module:Class`, bases in the same module included; of `module:function`
        its signature under the empty name, of `module:CONSTANT` "attribute". None: not there."""
        module_name, _, name = symbol.partition(":")
        tree = self.module(module_name)
        if tree is None:
            return None
        for node in _statements(tree.body):
            if isinstance(node, ast.ClassDef) and node.name == name:
                return self._class(module_name, node)
            if isinstance(node, _FUNCTIONS) and node.name == name:
                return {"": _signature(node)}
            if name in _assigned(node):
                return {"": "attribute"}
        return None

    def calls(self, symbol: str, names: tuple[str, ...]) -> str | None:
        """Which of `names` the function `module:Class.method` calls, in the order of its source."""
        module_name, _, path = symbol.partition(":")
        class_name, _, method = path.partition(".")
        tree = self.module(module_name)
        found = None if tree is None else _find(tree.body, class_name)
        function = _find(found.body, method) if isinstance(found, ast.ClassDef) else None
        if not isinstance(function, _FUNCTIONS):
            return None
        called = [
            (node.lineno, node.col_offset, name)
            for node in ast.walk(function)
            if isinstance(node, ast.Call | ast.Yield) and (name := _called(node)) in names
        ]
        # Walking goes level by level, not in the order of the source.
        return "calls " + ", ".join(name for _, _, name in sorted(called))

    def _class(self, module_name: str, node: ast.ClassDef) -> Members:
        members: Members = {}
        tree = self.module(module_name)
        assert tree is not None
        for base in node.bases:
            if isinstance(base, ast.Name) and isinstance(
                parent := _find(tree.body, base.id), ast.ClassDef
            ):
                members |= self._class(module_name, parent)
        for statement in node.body:
            if isinstance(statement, _FUNCTIONS):
                members[statement.name] = _signature(statement)
                members |= dict.fromkeys(_set_on_self(statement) - set(members), "attribute")
            else:
                members |= dict.fromkeys(_assigned(statement), "attribute")
        return members


def _statements(body: list[ast.stmt]) -> list[ast.stmt]:
    """Top-level statements, those under `if` and `try` included."""
    found: list[ast.stmt] = []
    for node in body:
        found.append(node)
        if isinstance(node, ast.If | ast.Try):
            found += _statements([*node.body, *node.orelse])
    return found


def _find(body: list[ast.stmt], name: str) -> ast.stmt | None:
    for node in _statements(body):
        if (
            isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and node.name == name
        ):
            return node
    return None


def _called(node: ast.Call | ast.Yield) -> str:
    if isinstance(node, ast.Yield):
        return "yield"
    return _name(node)


def _assigned(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.AnnAssign):
        return {node.target.id} if isinstance(node.target, ast.Name) else set()
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    return set()


def _set_on_self(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(function):
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        found |= {
            target.attr
            for target in targets
            if isinstance(target, ast.Attribute)
            and isinstance(target.value, ast.Name)
            and target.value.id == "self"
        }
    return found


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    decorators = {_name(decorator) for decorator in node.decorator_list}
    if decorators & {"property", "cached_property"}:
        return "property"
    kind = "abstract " if "abstractmethod" in decorators else ""
    kind += "class " if "classmethod" in decorators else ""
    kind += "static " if "staticmethod" in decorators else ""
    given = node.args
    places = [argument.arg for argument in [*given.posonlyargs, *given.args]]
    for index in range(len(given.defaults)):
        places[-1 - index] += "="
    if given.vararg is not None:
        places.append(f"*{given.vararg.arg}")
    elif given.kwonlyargs:
        places.append("*")
    for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        places.append(argument.arg + ("=" if default is not None else ""))
    if given.kwarg is not None:
        places.append(f"**{given.kwarg.arg}")
    return f"{kind}({', '.join(place for place in places if place not in ('self', 'cls'))})"


def _name(decorator: ast.expr) -> str:
    if isinstance(decorator, ast.Call):
        return _name(decorator.func)
    if isinstance(decorator, ast.Attribute):
        return decorator.attr
    return decorator.id if isinstance(decorator, ast.Name) else ""
