"""What Triton would decide without a word: names that are not specialised are parameters, and fusion is stated."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.launch_keys import launch_keys

from stree.kernels import ops

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


def test_every_kernel_states_whether_products_and_sums_are_one_instruction() -> None:
    silent = []
    for path in KERNELS.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and re.fullmatch(r"[a-z]\w*_kernel", function.name):
                named = [key.arg for each in function.decorator_list for key in getattr(each, "keywords", [])]
                silent += [function.name] * ("fuses" not in named)
    assert silent == []


def test_launches_say_so_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    probs = torch.rand(2, 40, device=device)
    with launch_keys(monkeypatch) as keys:
        ops.gated_activation(probs, probs, activation="silu", backend="triton")
        ops.choice(probs, torch.rand(2, device=device, dtype=torch.float64), backend="triton")
    assert ["('enable_fp_fusion', True)" in key for _, key in keys] == [True, False, False]
    assert all("'enable_fp_fusion', " in key for _, key in keys)


def test_a_grid_that_cuda_does_not_take_is_refused() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    probs = torch.zeros(65536, 1, device=device)
    lengths, path = torch.ones(65536, device=device).int(), torch.zeros(65536, 1, device=device).int()
    with pytest.raises(NotImplementedError, match=r"conv_kernel takes up to 65535 programs .* Got \(1, 65536\)"):
        ops.conv_commit(probs[..., None], probs[..., None], path, lengths, backend="triton")
