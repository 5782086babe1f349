"""_ballast.pyi, which type checkers read, says what the compiled module has."""

import ast
import pathlib

import pytest

from ballast import _ballast

STUB = ast.parse((pathlib.Path(_ballast.__file__).parent / "_ballast.pyi").read_text())
CLASSES = [node for node in STUB.body if isinstance(node, ast.ClassDef)]


def _is_property(function):
    return any(isinstance(mark, ast.Name) and mark.id == "property" for mark in function.decorator_list)


def _public(names):
    return {name for name in names if not name.startswith("_")}


def test_the_module_has_what_the_stub_says_and_no_more():
    said = {node.name for node in STUB.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    said |= {node.target.id for node in STUB.body if isinstance(node, ast.AnnAssign)}
    assert _public(said) == _public(vars(_ballast))


@pytest.mark.parametrize("stub", CLASSES, ids=lambda stub: stub.name)
def test_the_classes_are_as_the_stub_says(stub):
    found = getattr(_ballast, stub.name)
    said = {node.name: _is_property(node) for node in stub.body if isinstance(node, ast.FunctionDef)}
    assert _public(said) <= _public(vars(found))
    assert _public(said) == _public(vars(found)) or "__getattr__" in said
    for name in _public(said):
        assert isinstance(vars(found)[name], property) == said[name], name
