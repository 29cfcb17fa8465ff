"""Count what would launch kernels on a GPU, by the place where it happens, under Triton's interpreter.

Counted are launches of our Triton kernels and calls of ATen operators that would launch at least one kernel: views and
bare allocations launch none.  What one operator launches beyond its first kernel (sorting, for instance) is not seen,
so counts are lower bounds.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before any import

from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

# What launches nothing although its schema names no alias: allocations, and views that say so elsewhere.
FREE = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "_reshape_alias",
    "detach", "lift_fresh", "alias", "sym_size", "sym_stride", "sym_numel",
}  # fmt: skip


class LaunchCounter(TorchDispatchMode):
    """Counts launches.

    Args:
        place: returns where the program is.

    Attributes:
        found: number of launches by place and name of what is launched.
    """

    def __init__(self, place: Callable[[], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[tuple[Any, str]] = Counter()
        self._place, self._is_launching = place, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and count it."""
        if not self._is_launching and launches(func):
            self.found[self._place(), func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    @contextmanager
    def watching(self) -> Iterator[LaunchCounter]:
        """Count what happens inside."""
        real = InterpretedFunction.run

        def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            self.found[self._place(), kernel.fn.__name__] += 1
            self._is_launching = True  # the interpreter's own copies are no launches
            try:
                return real(kernel, *args, **kwargs)
            finally:
                self._is_launching = False

        InterpretedFunction.run = run
        try:
            with self:
                yield self
        finally:
            InterpretedFunction.run = real


def launches(func: Any) -> bool:
    """Whether an ATen operator would launch a kernel on a GPU."""
    if func.overloadpacket.__name__ in FREE:
        return False
    schema = func._schema
    tensors = [value for value in (*schema.arguments, *schema.returns) if "Tensor" in str(value.type)]
    given = [value.alias_info for value in schema.returns]
    return bool(tensors) and (not given or any(alias is None or alias.is_write for alias in given))
