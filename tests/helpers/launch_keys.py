"""Which build each launch of a kernel asks Triton for: its key, as the just-in-time compiler would form it on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, create_function_from_signature

Key = tuple[str, str]


def _form_key(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Key:
    """Name the build of one launch by types, divisibilities, constants and options."""
    options = kernel.kwargs if isinstance(kernel, InterpretedFunction) else {
        "do_not_specialize": kernel.do_not_specialize,
        "do_not_specialize_on_alignment": kernel.do_not_specialize_on_alignment,
    }  # fmt: skip
    compiled = JITFunction(kernel.fn, **{name: value for name, value in options.items() if name.startswith("do_not")})
    backend = make_backend(GPUTarget("cuda", 90, 32))
    bound, specialization, rest = create_function_from_signature(compiled.signature, compiled.params, backend)(
        *args, **kwargs
    )
    constants = {param.name: bound[param.name] for param in compiled.params if param.is_constexpr}
    return kernel.fn.__name__, str((specialization, constants, sorted(rest.items())))


@contextmanager
def launch_keys(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Key]]:
    """Collect the keys of the launches made inside; the kernels run as ever."""
    keys: list[Key] = []

    def watched(real: Callable[..., Any]) -> Callable[..., Any]:
        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            keys.append(_form_key(kernel, args, kwargs))
            return real(kernel, *args, grid=grid, warmup=warmup, **kwargs)

        return run

    with monkeypatch.context() as patch:
        for kind in (InterpretedFunction, JITFunction):
            patch.setattr(kind, "run", watched(kind.run))
        yield keys
