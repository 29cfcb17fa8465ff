"""Stand-ins of causal-conv1d, mamba-ssm and fla, which take tensors on a GPU only; transformers binds them as it would.

In a process of its own, ``write_packages`` makes a folder for PYTHONPATH; in this one, ``bind_packages`` binds the
functions of one modeling file anew, with transformers' own decorator.
"""

from __future__ import annotations

import inspect
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from transformers.integrations import hub_kernels

FUNCTIONS = {
    "causal_conv1d": ("causal_conv1d_fn", "causal_conv1d_update"),
    "mamba_ssm": (
        "mamba_chunk_scan_combined", "mamba_inner_fn", "mamba_split_conv1d_scan_combined", "selective_scan_fn",
        "selective_state_update",
    ),
    "fla": ("chunk_gated_delta_rule", "chunk_kda", "fused_recurrent_gated_delta_rule", "fused_recurrent_kda"),
}  # fmt: skip
DECORATED = re.compile(
    r'@use_kernel_func_from_hub_with_fallback\(\s*"(\w+)",\s*"(\w+)"[^)]*\)\s*def (\w+)\(', re.MULTILINE
)
REFUSAL = "Expected x to be a CUDA tensor, but got one on cpu"


def refuse(*args: Any, **kwargs: Any) -> Any:
    """Refuse tensors on a CPU, as the packages do; no other device is here."""
    raise RuntimeError(REFUSAL)


def aligned_only(seen: list[tuple[int, ...]]) -> Callable[..., Tensor]:
    """Return a stand-in of ``causal_conv1d_fn`` that checks strides as its C++ code does, and notes them."""

    def causal_conv1d_fn(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append(x.stride())
        if x.stride(1) == 1 and x.stride(2) > 1:
            if x.shape[1] % 8:
                raise RuntimeError("causal_conv1d only supports channel dimension divisible by 8 for now")
            if x.stride(0) % 8 or x.stride(2) % 8:
                raise RuntimeError("causal_conv1d with channel last layout requires strides to be multiples of 8")
        elif x.stride(2) != 1:
            raise RuntimeError(f"causal_conv1d takes contiguous tokens or channels, got strides {x.stride()}")
        return x

    return causal_conv1d_fn


def write_packages(folder: Path) -> None:
    """Write the packages as one file each."""
    for package, names in FUNCTIONS.items():
        functions = (f"def {name}(*args, **kwargs):\n    raise RuntimeError({REFUSAL!r})\n" for name in names)
        (folder / f"{package}.py").write_text("\n\n".join(functions), encoding="utf-8")


def bind_packages(
    monkeypatch: pytest.MonkeyPatch, kind: type, changes: dict[str, Callable[..., Any]] | None = None
) -> set[str]:
    """Bind the functions of a mixer class's file to the packages, as if they could be imported; return their names.

    Args:
        monkeypatch: undoes it.
        kind: the class.
        changes: by name, functions in place of those that refuse; if given, the packages have these only.
    """
    for package, names in FUNCTIONS.items():
        module: Any = types.ModuleType(package)
        for name in names:
            if changes is None or name in changes:
                setattr(module, name, refuse if changes is None else changes[name])
        monkeypatch.setitem(sys.modules, package, module)
    file, bound = sys.modules[kind.__module__], set()
    for name, package, attribute in DECORATED.findall(inspect.getsource(file)):
        decorate = hub_kernels.use_kernel_func_from_hub_with_fallback(name, package)
        monkeypatch.setattr(file, attribute, decorate(inspect.unwrap(getattr(file, attribute))))
        bound.add(name)
    return bound
