"""The functions of convolution and scan that transformers' mixers call in a plain forward, such as prefill.

transformers binds them when a modeling file is imported: to those of causal-conv1d, mamba-ssm or fla where these
packages import, whatever the device of the model, else to its own in torch.  ``route_functions`` puts a function in
front of each, in the globals of the modeling file, that changes only calls that would fail: tensors on a CPU go to
transformers' torch function, and a convolution's input has strides that causal-conv1d takes.  Inside
``memory_bounded`` the torch functions run in slices, and Mamba-2's scan on a CPU is ``ssd_chunk_scan``.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import logging
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stree.models.bounded_scan import SCANS, bounds_memory, run_in_slices, scan_without_values
from stree.models.ssd_prefill import ssd_chunk_scan

__all__ = [
    "BoundFunction",
    "functions_of",
    "measured_on",
    "route_functions",
    "route_model",
    "serving_packages",
    "version_of",
    "warn_of_torch_functions",
]

DISTRIBUTIONS = {"causal_conv1d": "causal-conv1d", "mamba_ssm": "mamba-ssm", "fla": "flash-linear-attention"}
ALIGNMENT = 8  # elements: causal-conv1d's channel-last kernel takes strides of multiples of it
PACKED = ("seq_idx", "cu_seqlens")  # arguments that keep packed sequences apart, which the torch functions cannot
PREFILL = ("causal_conv1d_fn", *SCANS)  # the others serve one-token decoding and training

# Variables of the decorator by which a bound function is recognised, and the one of package kernels.
CELLS = {"func", "func_name", "is_new_implementation", "package", "torch_function"}

logger = logging.getLogger("stree")
_measured_device: ContextVar[torch.device | None] = ContextVar("measured_device", default=None)


@dataclass(frozen=True, slots=True, eq=False)
class BoundFunction:
    """A function as transformers bound it.

    Attributes:
        name: of the package's function.
        package: name of its module.
        from_package: whether the package's function serves; else transformers' torch function does.
        call: the bound function.
        torch_call: transformers' torch function.
    """

    name: str
    package: str
    from_package: bool
    call: Callable[..., Any]
    torch_call: Callable[..., Any]

    @property
    def is_from_hub(self) -> bool:
        """Whether ``kernelize`` has set a function of the hub."""
        return isinstance(self.call, nn.Module) and "forward" in vars(self.call)

    def serves(self, device: torch.device) -> bool:
        """Return whether another package's function serves calls with tensors on a device."""
        if device.type == "meta":
            device = _measured_device.get() or device
        return (self.from_package or self.is_from_hub) and device.type != "cpu"

    def scan(self, device: torch.device) -> Callable[..., Any]:
        """Return the torch function that scans prompts on a device."""
        is_ssd = self.name == "mamba_chunk_scan_combined" and device.type == "cpu"
        return ssd_chunk_scan if is_ssd else self.torch_call

    def server(self, device: torch.device) -> str:
        """Return what serves calls with tensors on a device: package and version, "hub" or "torch"."""
        if self.is_from_hub:
            return "hub"
        return f"{self.package} {version_of(self.package)}" if self.serves(device) else "torch"


@contextmanager
def measured_on(device: torch.device) -> Iterator[None]:
    """Let scans of tensors on ``meta`` return at once, with the temporaries that they would make on a device."""
    token = _measured_device.set(device)
    try:
        yield
    finally:
        _measured_device.reset(token)


def functions_of(kind: type) -> dict[str, BoundFunction]:
    """Return the bound functions that the methods of a module class call, by name."""
    methods = [inspect.unwrap(one) for base in kind.__mro__ for one in vars(base).values() if inspect.isfunction(one)]
    called = {name for method in methods for name in method.__code__.co_names}
    found = (_bound_function(one) for file in _files(kind) for name, one in vars(file).items() if name in called)
    return {one.name: one for one in found if one is not None}


def route_functions(kind: type) -> None:
    """Route the bound functions of the file of a module class, once for the process."""
    for module in _files(kind):
        for name, function in [*vars(module).items()]:
            bound = _bound_function(function)
            if bound is not None and not hasattr(function, "bound_function"):
                setattr(module, name, _routed(bound))


def route_model(model: nn.Module) -> None:
    """Route the bound functions that the modules of a model may call, which no TreeLM is made of."""
    for kind in {type(module) for module in model.modules()}:
        route_functions(kind)


def serving_packages(kind: type, device: torch.device) -> dict[str, str]:
    """Return by name what serves each function of a module class's plain forward on a device."""
    return {name: one.server(device) for name, one in sorted(functions_of(kind).items())}


def version_of(package: str) -> str:
    """Return the version of a package's distribution, or what its module says, or that it is unknown."""
    try:
        return importlib.metadata.version(DISTRIBUTIONS.get(package, package))
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(sys.modules.get(package), "__version__", "unknown"))


def warn_of_torch_functions(kinds: Iterable[type], device: torch.device) -> None:
    """Log which packages would make prefill of module classes faster on a CUDA device; nothing on other devices."""
    if device.type != "cuda":
        return
    missing: dict[str, set[str]] = {}
    for kind in kinds:
        for name, one in functions_of(kind).items():
            if name in PREFILL and not one.serves(device):
                missing.setdefault(one.package, set()).add(kind.__name__)
    if missing:
        names = sorted(set().union(*missing.values()))
        packages = " ".join(DISTRIBUTIONS.get(package, package) for package in sorted(missing))
        logger.warning(
            "Prefill of %s on %s runs transformers' torch functions, which are correct and much slower. For speed, "
            "install %s (docs/gpu.md, Packages for prefill)", ", ".join(names), device, packages,
        )  # fmt: skip


def _files(kind: type) -> list[types.ModuleType]:
    """List the modules in which a class and its bases are defined, those of torch left out."""
    names = {base.__module__ for base in kind.__mro__ if issubclass(base, nn.Module) and base is not nn.Module}
    return [sys.modules[name] for name in sorted(names) if name in sys.modules]


def _bound_function(function: Any) -> BoundFunction | None:
    """Return what transformers' decorator bound, or None for other objects."""
    if not isinstance(function, (types.FunctionType, nn.Module)):
        return None
    if isinstance(function, types.FunctionType) and hasattr(function, "bound_function"):
        return function.bound_function  # type: ignore[no-any-return]
    # The package kernels, where it is installed, makes a module of the function.
    cells = _cells(_cells(type(function).forward).get("func") if isinstance(function, nn.Module) else function)
    if "is_new_implementation" not in cells:
        return None
    return BoundFunction(
        cells["func_name"], cells["package"], cells["is_new_implementation"], function, cells["torch_function"]
    )


def _cells(function: Any) -> dict[str, Any]:
    """Return the variables of enclosing functions that a function reads."""
    if not isinstance(function, types.FunctionType) or function.__closure__ is None:
        return {}
    names = zip(function.__code__.co_freevars, function.__closure__, strict=True)
    return {name: cell.cell_contents for name, cell in names if name in CELLS}


def _routed(bound: BoundFunction) -> Callable[..., Any]:
    """Return a function that chooses by the device of a call's first tensor."""

    @functools.wraps(bound.torch_call)
    def call(*args: Any, **kwargs: Any) -> Any:
        device = next(one.device for one in (*args, *kwargs.values()) if isinstance(one, Tensor))
        measured = _measured_device.get()
        if bound.name in SCANS and measured is not None:
            scanned_on = None if bound.serves(device) else measured
            scan = bound.scan(measured)
            return scan_without_values(bound.name, scan, *args, has_temporaries_on=scanned_on, **kwargs)
        if bound.serves(device) and measured is None:
            if bound.name == "causal_conv1d_fn":
                args = (_aligned(args[0]), *args[1:])
            return bound.call(*args, **kwargs)
        if bound.from_package and any(kwargs.get(name) is not None for name in PACKED):
            raise ValueError(f"{bound.name} of packed sequences needs tensors on a GPU, got tensors on {device}")
        if bound.name in SCANS and bounds_memory():
            return run_in_slices(bound.name, bound.scan(device), *args, **kwargs)
        if not bound.from_package:
            return bound.call(*args, **kwargs)
        names = inspect.signature(bound.torch_call).parameters
        return bound.torch_call(*args, **{name: one for name, one in kwargs.items() if name in names})

    call.bound_function = bound  # type: ignore[attr-defined]
    return call


def _aligned(x: Tensor) -> Tensor:
    """Copy float[batch, channels, tokens] to a contiguous one if causal-conv1d would refuse its strides."""
    is_channel_last = x.stride(1) == 1 and x.stride(2) > 1
    if is_channel_last and any(size % ALIGNMENT for size in (x.shape[1], x.stride(0), x.stride(2))):
        return x.clone(memory_format=torch.contiguous_format)
    return x
