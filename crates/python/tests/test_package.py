"""The stubs, the docstrings and the README's program."""

import ast
import inspect
from pathlib import Path

import pytest

import kvarena

STUBS = ast.parse((Path(kvarena.__file__).parent / "_kvarena.pyi").read_text())
CLASSES = {node.name: node for node in STUBS.body if isinstance(node, ast.ClassDef)}
# What Python gives each object, and fields of an exception's instance.
OWN = {"__new__", "__buffer__", "wanted", "available", "after"}


def names(node):
    functions = {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
    return functions | {one.target.id for one in node.body if isinstance(one, ast.AnnAssign)}


def test_stubs_name_each_class_and_method():
    assert set(CLASSES) == set(kvarena.__all__)
    for name in ("Admission", "Array", "Engine", "Plan", "Tree"):
        cls = getattr(kvarena, name)
        public = {member for member in vars(cls) if not member.startswith("_")}
        assert public == {member for member in names(CLASSES[name]) if not member.startswith("_")}, name


def test_stubs_have_the_parameters_and_defaults():
    for name in ("Engine", "Tree"):
        for method in CLASSES[name].body:
            if not isinstance(method, ast.FunctionDef) or method.decorator_list:
                continue
            own = getattr(kvarena, name) if method.name == "__new__" else getattr(getattr(kvarena, name), method.name)
            signature = inspect.signature(own)
            arguments = method.args.args[1:] + method.args.kwonlyargs
            known = [parameter for parameter in signature.parameters if parameter != "self"]
            assert [argument.arg for argument in arguments] == known, method.name
            given = method.args.defaults + [default for default in method.args.kw_defaults if default]
            defaults = [parameter.default for parameter in signature.parameters.values()]
            defaults = [default for default in defaults if default is not inspect.Parameter.empty]
            assert [ast.literal_eval(default) for default in given] == defaults, method.name


def test_each_public_name_has_a_docstring():
    for name in kvarena.__all__:
        cls = getattr(kvarena, name)
        assert cls.__doc__, name
        for member, value in vars(cls).items():
            if not member.startswith("_") and not issubclass(cls, Exception):
                assert value.__doc__, f"{name}.{member}"


def test_the_program_of_the_readme(capsys):
    readme = Path(__file__).parents[1] / "README.md"
    program = readme.read_text().split("```python\n")[1].split("```")[0]
    exec(program, {})
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("module", ["minisgl", "nanovllm", "sglang"])
def test_adapters_have_few_lines(module):
    path = Path(kvarena.__file__).parent / "adapters" / f"{module}.py"
    assert len(path.read_text().splitlines()) <= (1000 if module == "sglang" else 300)
