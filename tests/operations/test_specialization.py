"""Names that Triton kernels list as not specialised are parameters: Triton ignores others without a word."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

KERNELS = Path(__file__).resolve().parent.parent.parent / "kernels"
FILES = [path for path in sorted(KERNELS.rglob("*.py")) if "do_not_specialize" in path.read_text()]


def unknown_names(source: str) -> Iterator[str]:
    """List literal names in do_not_specialize lists that are no parameters of the kernel below."""
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef):
            parameters = {argument.arg for argument in function.args.args}
            for decorator in function.decorator_list:
                lists = [key.value for key in getattr(decorator, "keywords", []) if str(key.arg).startswith("do_not")]
                names = [str(node.value) for each in lists for node in ast.walk(each) if isinstance(node, ast.Constant)]
                yield from (f"{function.name}: {name}" for name in names if name not in parameters)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(KERNELS)))
def test_names_that_are_not_specialised_are_parameters(path: Path) -> None:
    assert list(unknown_names(path.read_text())) == []


def test_a_name_that_is_no_parameter_is_found() -> None:
    source = '@triton.jit(do_not_specialize=["n", "stride_x"])\ndef kernel(x_ptr, n, stride): ...'
    assert list(unknown_names(source)) == ["kernel: stride_x"]
