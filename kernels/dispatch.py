"""Which implementation serves an operation: plain torch, one for the CPU, or Triton, by the device of its tensors.

On a GPU "auto" means Triton and the host reads no values.  `as_on_device` makes tensors that are not on a GPU follow
the same paths, for tests under Triton's interpreter and for counts of launches.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, lru_cache
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

__all__ = [
    "CPU",
    "LEAST_SHARED",
    "REFERENCE",
    "TRITON",
    "Backend",
    "Behaviour",
    "Operands",
    "as_on_device",
    "backend_of",
    "behaving",
    "bound",
    "check_launch",
    "choose",
    "draws_in_kernels",
    "fixes_shapes",
    "has_own",
    "has_triton",
    "host_bound",
    "host_can_read",
    "is_known_all",
    "launches",
    "may_have_any",
    "module_of",
    "most_true",
    "shared_memory",
    "uses_triton",
]

Backend = Literal["auto", "reference", "triton"]
LEAST_SHARED = 101376  # bytes a block on GPUs of compute capability 8.6, 8.9 and 12.0; A100 and H100 have more


class Operands(SimpleNamespace):
    """The checked arguments of one call of an operation, as attributes of their names in `stree.kernels.ops`.

    `topology` holds the trees in place of `parents`, and `accepted` the path, or None, in place of `path` and
    `path_lengths`.
    """


# Operation -> module with a function of that name.  `stree.kernels.shapes.operation` enters what it declares.
REFERENCE: dict[str, str] = {}
TRITON: dict[str, str] = {}
CPU: dict[str, str] = {}


@dataclass(frozen=True, slots=True, eq=False)
class Behaviour:
    """How tensors that are not on a GPU are treated.

    Attributes:
        uses_triton: whether what is shared by the layers of a step runs in Triton: indices, tree growth, verification,
            bookkeeping.
        host_can_read: whether the host may read values of CPU tensors.
        operations: operations of `stree.kernels.ops` for which "auto" means Triton.
        replaced: what serves an operation on any device, by its name, in place of what the library has.
        launches: whether Triton's kernels run; if not, they leave their outputs as allocated, on any device.
    """

    uses_triton: bool = False
    host_can_read: bool = True
    operations: Container[str] = ()
    launches: bool = True
    replaced: Mapping[str, Callable[..., Any]] = field(default_factory=dict)


_behaviour: ContextVar[Behaviour] = ContextVar("behaviour", default=Behaviour())  # noqa: B039 frozen


@contextmanager
def behaving(behaviour: Behaviour) -> Iterator[None]:
    """Choose implementations by a behaviour, in this thread; pass one object every time, by which choices are kept."""
    token = _behaviour.set(behaviour)
    try:
        yield
    finally:
        _behaviour.reset(token)


@contextmanager
def as_on_device(
    *, triton: bool = True, host_can_read: bool = False, operations: Container[str] = (), launches: bool = True
) -> Iterator[None]:
    """Treat tensors that are not on a GPU as if they were, in this thread; also a decorator.

    Args:
        triton: whether steps use Triton kernels, which on the CPU needs the interpreter.
        host_can_read: whether the host still reads values.
        operations: operations of `stree.kernels.ops` for which "auto" means Triton; `TRITON` for all that have it.
        launches: False to measure what is allocated for kernels, which then do not run.
    """
    with behaving(Behaviour(triton, host_can_read, operations, launches)):
        yield


def launches() -> bool:
    """Whether Triton's kernels run."""
    return _behaviour.get().launches


def host_can_read(tensor: Tensor) -> bool:
    """Whether the host can read values of a tensor without synchronising with a device."""
    return tensor.is_cpu and _behaviour.get().host_can_read


def fixes_shapes(tensor: Tensor) -> bool:
    """Whether the shapes of a step must not depend on values of tensors like this one: the host cannot read them."""
    return not host_can_read(tensor)


def host_bound(values: Tensor, otherwise: int, *, waits: bool = False) -> int:
    """Return the greatest of some integers, where the host can read them freely, else a bound of them.

    Args:
        values: int[...], at least one.
        otherwise: a bound that is known without reading.
        waits: whether to read the values in any case, which synchronises with a device.
    """
    return int(values.max()) if waits or host_can_read(values) else otherwise


def may_have_any(is_there: Tensor) -> bool:
    """Return whether any of bool[...] is True; True where the host cannot read them freely."""
    return not host_can_read(is_there) or bool(is_there.any())


def most_true(is_there: Tensor) -> int:
    """Return the greatest number of True in a row of bool[batch, n], where the host can read them freely, else n."""
    return int(is_there.sum(1).max()) if host_can_read(is_there) else is_there.shape[1]


def is_known_all(is_there: Tensor) -> bool:
    """Return whether all of bool[...] are True; False where the host cannot read them freely."""
    return host_can_read(is_there) and bool(is_there.all())


def uses_triton(tensor: Tensor) -> bool:
    """Whether a step's indices, tree growth, verification and bookkeeping run in Triton on a tensor's device."""
    return tensor.is_cuda or _behaviour.get().uses_triton


def backend_of(tensor: Tensor) -> str:
    """Return what serves a step's tree growth: "triton", "cpu" where the host can read the tensors, or "reference"."""
    behaviour, device = _behaviour.get(), tensor.device.type
    if behaviour.uses_triton or device == "cuda":
        return "triton"
    return "cpu" if behaviour.host_can_read and device == "cpu" else "reference"


def draws_in_kernels(scores: Tensor) -> bool:
    """Whether verification of these logits or probabilities is done by Triton kernels, which draw their own numbers.

    They take counters of `stree.kernels.ops.philox_uniform` in place of an object that draws.
    """
    return uses_triton(scores) and scores.dtype != torch.float64


def has_triton(op: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether "auto" means Triton: for CUDA tensors of an operation that has a Triton version, but not in float64."""
    return _best_backend(op, device.type, dtype, _behaviour.get()) == "triton"


def has_own(op: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether "auto" means another version than the reference: Triton, or one for the CPU."""
    return _best_backend(op, device.type, dtype, _behaviour.get()) != "reference"


@lru_cache(maxsize=4096)
def _best_backend(op: str, device: str, dtype: torch.dtype, behaviour: Behaviour) -> str:
    """Choose what "auto" means."""
    if (device == "cuda" or op in behaviour.operations) and op in TRITON and dtype != torch.float64:
        return "triton"
    is_supported = dtype not in (torch.float16, torch.bfloat16)  # which numba does not have
    return "cpu" if device == "cpu" and behaviour.host_can_read and op in CPU and is_supported else "reference"


@lru_cache(maxsize=4096)
def bound(
    op: str, backend: Backend, device: str, dtype: torch.dtype, behaviour: Behaviour
) -> Callable[..., Any] | None:
    """Return what `choose` returns, without a search from the second call on; None for what is checked at each call.

    Those are Triton, whose launches are made on the tensor's own device, and backends that are refused.
    """
    if backend == "auto" and op in behaviour.replaced:
        return behaviour.replaced[op]
    chosen: str = backend
    if backend == "auto":
        chosen = _best_backend(op, device, dtype, behaviour)
    if chosen == "reference" or (chosen == "cpu" and backend == "auto"):
        function: Callable[..., Any] = getattr(module_of((CPU if chosen == "cpu" else REFERENCE)[op]), op)
        return function
    return None


def choose(op: str, backend: Backend, tensor: Tensor) -> Callable[..., Any]:
    """Return the implementation of an operation for a tensor's device."""
    function: Callable[..., Any] | None = bound(op, backend, tensor.device.type, tensor.dtype, _behaviour.get())
    if function is not None:
        return function
    if backend not in ("auto", "triton"):
        raise ValueError(f"backend must be 'auto', 'reference' or 'triton', got {backend!r}")
    if op not in TRITON:
        raise RuntimeError(f"{op} has no Triton version; those that have one: {', '.join(sorted(TRITON)) or 'none'}")
    check_launch(f"{op} with backend='triton'", tensor)
    function = getattr(module_of(TRITON[op]), op)
    if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
        return _launched_on(tensor.device, function)
    return function


def check_launch(what: str, tensor: Tensor) -> None:
    """Raise RuntimeError unless Triton can run on a tensor: it is on a GPU that has room, or Triton interprets."""
    if not launches():
        return
    if not tensor.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError(f"{what} needs CUDA tensors, got a tensor on {tensor.device}")
    if shared_memory(tensor.device) < LEAST_SHARED:
        raise RuntimeError(
            f"{what} needs a GPU of compute capability 8.0 or later, with {LEAST_SHARED} bytes of shared memory "
            f"a block; {tensor.device} has {shared_memory(tensor.device)}"
        )


@cache
def shared_memory(device: torch.device) -> int:
    """Return how many bytes of shared memory a block may ask for; where there is no GPU, those of an H100."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return 232448
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


@cache  # ``sys.modules`` would also hold what another thread is still importing
def module_of(name: str) -> ModuleType:
    """Import a module once, waiting for a thread that imports it."""
    return importlib.import_module(name)


def _launched_on(device: torch.device, function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a device the current one during a call: Triton launches there, wherever the tensors are."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.cuda.device(device):
            return function(*args, **kwargs)

    return call
