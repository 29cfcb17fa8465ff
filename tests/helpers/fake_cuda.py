"""CUDA tensors without a GPU: they have shapes, dtypes and a device, and no values.

A step that mixes devices or reads a value fails, and so does a kernel that is launched with a tensor of the host.
"""

from __future__ import annotations

import contextlib
import ctypes
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedModel
from triton.runtime.interpreter import InterpretedFunction

from stree.decode.step import DecodeStep
from stree.decode.step_result import StepResult
from stree.kernels.dispatch import TRITON, as_on_device
from stree.models import checks, tree_lm
from stree.models.heads import weights

__all__ = ["Devices", "fake_cuda", "on_fake_cuda"]

CUDA, CPU = 1, 0  # numbers of device types in torch's C++ code


class Devices(TorchDispatchMode):
    """Run operators on fake tensors where one of their tensors is fake or their device is CUDA.

    Attributes:
        launches: of kernels, by name.
        transfers: for which each step waits: reads of a value, copies of memory of the host that is not pinned, and
            copies to the host that block.
        in_step: whether a step runs.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches: Counter[str] = Counter()
        self.transfers: list[list[str]] = []
        self.in_step = False
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._pinned: list[Tensor] = []

    def pinned(self, tensor: Tensor) -> Tensor:
        """Remember that a tensor of the host is pinned."""
        self._pinned.append(tensor)
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        is_for_cuda = device is not None and torch.device(device).type == "cuda"
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not is_for_cuda and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name == "copy_" and not isinstance(args[0], FakeTensor):
            if not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False)):
                self._note("blocking copy to the host")
            return args[0].zero_()  # the copy of values that do not exist
        if name == "_to_copy" and args[0].is_cuda and device is not None and not is_for_cuda:
            self._note("blocking copy to the host")
        if name in ("_to_copy", "copy_"):
            source = args[1] if name == "copy_" else args[0]
            if source.device.type == "cpu" and not any(source is pinned for pinned in self._pinned):
                self._note(f"{name} of {[*source.shape]}")
        if name == "_local_scalar_dense":
            self._note("read")
            return 1
        if is_for_cuda:  # a number or tensor of the host that is copied to the device
            args = tree_map(lambda x: self._fake.from_tensor(x) if type(x) is Tensor else x, args)
        with self._fake:
            return func(*args, **kwargs)

    def _note(self, what: str) -> None:
        if self.in_step:
            frames = [frame for frame in traceback.extract_stack() if "/stree/" in frame.filename]
            self.transfers[-1].append(f"{what} at {frames[-1].filename.split('/stree/')[-1]}:{frames[-1].lineno}")


@contextlib.contextmanager
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Devices]:
    """Let torch make fake CUDA tensors inside, Triton launch nothing, and prompts be run without values.

    What the host reads of a step is taken to be one accepted token for each row.
    """
    devices = Devices()
    empty, tensor_of, load_of = torch.empty, torch.tensor, torch.load

    def launch(kernel: Any, *args: Any, **options: Any) -> None:
        devices.launches[kernel.fn.__name__] += 1
        on_host = [
            name
            for name, x in zip(kernel.arg_names, args, strict=False)
            if isinstance(x, Tensor) and x.device.type == "cpu"
        ]
        assert not on_host, f"{kernel.fn.__name__} is launched with tensors of the host: {on_host}"

    def allocate(*sizes: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        made = empty(*sizes, **options)
        return devices.pinned(made) if pin_memory else made

    def tensor(data: Any, *, device: Any = None, **options: Any) -> Tensor:  # torch's own asks no dispatch mode
        made = tensor_of(data, **options)
        return made if device is None else made.to(device)

    def new_tensor(self: Tensor, data: Any, **options: Any) -> Tensor:
        return tensor(data, **{"dtype": self.dtype, "device": self.device, **options})

    def load(file: Any, map_location: Any, **options: Any) -> Any:
        return tree_map(lambda x: x.to(map_location), load_of(file, **options))

    def prompts(lm: Any, state: Any, tokens: Any, sizes: Any, layers: Any = None) -> tuple[Tensor, list[Tensor]]:
        state.length_bound = max(sizes)
        shape = len(sizes), max(sizes), len(layers or ()), lm.model.config.get_text_config().hidden_size
        hidden = [torch.empty(shape, dtype=lm.dtype, device="cuda")] if layers else []
        return torch.empty(len(sizes), lm.vocab_size, device="cuda"), hidden

    def opened(path: str, device: str = "cpu") -> Any:
        file: Any = safe_open(path, "pt")
        return contextlib.nullcontext(SimpleNamespace(
            keys=file.keys, get_tensor=lambda name: file.get_tensor(name).to(device)
        ))  # fmt: skip

    def step(self: DecodeStep, *args: Any, **options: Any) -> StepResult:
        devices.transfers.append([])
        devices.in_step = True
        result = call(self, *args, **options)
        devices.in_step = False
        return result

    def drafter_failed(self: DecodeStep, problem: Exception) -> None:
        raise problem  # instead of going on without it

    def first_tokens(self: DecodeStep, rows: Tensor, logits: Tensor) -> tuple[list[int], Tensor]:
        return [1] * len(rows), logits

    def emitted(self: StepResult) -> tuple[list[list[int]], list[int], dict[int, Exception]]:
        assert type(self.report) is Tensor and self.report.device.type == "cpu"
        return [[1]] * len(self.report), [1] * len(self.report), {}

    call = DecodeStep.__call__
    with monkeypatch.context() as patch, device_guards():
        patch.setenv("STREE_DEBUG", "")  # which compares addresses of memory
        for name, value in fakes().items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(torch, "empty", allocate)
        patch.setattr(torch, "tensor", tensor)
        patch.setattr(torch, "load", load)
        patch.setattr(Tensor, "new_tensor", new_tensor)
        patch.setattr(InterpretedFunction, "run", launch)
        patch.setattr(tree_lm, "run_prompts", prompts)
        patch.setattr(checks, "PLAIN", (*checks.PLAIN, FakeTensor))
        patch.setattr(weights, "_opened", opened)
        patch.setattr(tree_lm, "check_adapters", lambda lm: None)
        patch.setattr(tree_lm.TreeLM, "check_tokens", lambda self, tokens: None)
        patch.setattr(DecodeStep, "__call__", step)
        patch.setattr(DecodeStep, "_decode_without_drafter", drafter_failed)
        patch.setattr(DecodeStep, "first_tokens", first_tokens)
        patch.setattr(StepResult, "emitted", emitted)
        with devices, torch.no_grad():
            yield devices


def on_fake_cuda(model: PreTrainedModel) -> PreTrainedModel:
    """Move a model to the fake device, once what is recognised by results was looked at."""
    with as_on_device(operations=TRITON):
        tree_lm.TreeLM(model).release()
    for module in model.modules():
        for values in (module._parameters, module._buffers):
            for name, value in values.items():
                if value is not None:
                    moved = torch.empty(value.shape, dtype=value.dtype, device="cuda")
                    values[name] = nn.Parameter(moved, requires_grad=False) if values is module._parameters else moved
    return model


@contextlib.contextmanager
def device_guards() -> Iterator[None]:
    """Let C++ code select a CUDA device where torch was built without CUDA; selecting the CPU does nothing either."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * (CUDA + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    before = guards[CUDA]
    guards[CUDA] = guards[CPU]
    try:
        yield
    finally:
        guards[CUDA] = before


def fakes() -> dict[str, Any]:
    """Return the functions of `torch.cuda` that a step calls, for a device that has ended all its work."""

    class Nothing:
        def __init__(self, *args: Any, **options: Any) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *error: object) -> None: ...
        def record(self, *stream: Any) -> None: ...
        def synchronize(self) -> None: ...
        def wait_stream(self, stream: Any) -> None: ...
        def wait_event(self, event: Any) -> None: ...
        def query(self) -> bool:
            return True

        def elapsed_time(self, other: Any) -> float:
            return 1.0

    nothing = {name: lambda *args: None for name in ("_lazy_init", "synchronize", "empty_cache")}
    numbers = {"current_device": 0, "is_current_stream_capturing": False, "mem_get_info": (80 << 30, 80 << 30)}
    properties = SimpleNamespace(shared_memory_per_block_optin=232448, multi_processor_count=132)
    constant = {**numbers, "get_device_properties": properties, "current_stream": Nothing(), "memory_allocated": 0}
    return {
        **nothing, **{name: lambda *args, value=value: value for name, value in constant.items()},
        **dict.fromkeys(("Event", "Stream", "device", "device_of", "stream"), Nothing),
    }  # fmt: skip
