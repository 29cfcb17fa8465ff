"""A watch over host reads: on a GPU each would make the host wait for the device."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class NoHostReads(TorchDispatchMode):
    """Fail on operators whose result or shape depends on data that the host would have to read."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("index", "index_put", "index_put_"):  # tagged, but only masks are read
            reads = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        else:
            reads = torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
        if reads:
            raise AssertionError(f"{func} reads the device")
        return func(*args, **(kwargs or {}))
