"""Dispatch modes that fail on host reads, which synchronise with a GPU, or record the operators of a step."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class NoHostReads(TorchDispatchMode):
    """Fail on operators whose result or shape depends on data that the host would have to read, and on reading it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._methods = _NoReadingMethods()

    def __enter__(self) -> NoHostReads:
        self._methods.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._methods.__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("index", "index_put", "index_put_"):  # tagged, but only masks are read
            reads = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        else:
            reads = torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
        if reads:
            raise AssertionError(f"{func} reads the device")
        return func(*args, **(kwargs or {}))


class _NoReadingMethods(TorchFunctionMode):
    """Fail on methods that read a tensor without an operator."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("tolist", "numpy", "__array__"):
            raise AssertionError(f"{func.__name__} reads the device")
        return func(*args, **(kwargs or {}))


class ResultSizes(TorchDispatchMode):
    """Record every operator with the sizes of its results: a captured graph needs them to be alike in all steps."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[str, list[list[int]]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        parts = out if isinstance(out, (tuple, list)) else (out,)
        self.seen.append((str(func), [[*part.shape] for part in parts if isinstance(part, torch.Tensor)]))
        return out
