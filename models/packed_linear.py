"""Linear layers on a CPU, for the few rows of a tree and the many of a prompt: faster than torch's ``linear``.

Many rows run on a copy of the weight in oneDNN's layout.  A few rows run on one thread by numba's code, which reads the
weight as it is stored.  One thread of an AMD processor with AVX-512, whole forwards in float32, oneDNN's time over
numba's: the bundled target 1.56 for 2 rows, 1.28 for 4, 1.21 for 8 and 1.03 for 16; Mamba-2 129M, of large weights,
1.34, 1.02, 0.88 and 0.82; in bfloat16 numba's is the faster for 1 and 2 rows.  Without AVX-512, for Mamba-2 129M, 2.3
for one row, 1.7 for 4, 1.7 for 8, 1.5 for 16 and 0.96 for 32, and on two threads, of which numba's code has one, 1.5,
1.3, 1.2, 1.04 and 0.92.  With several threads oneDNN multiplies four rows faster than one or two by a large weight.

In a compiled function one row in float32 is a sum over products, which inductor fuses with its neighbours; by a large
weight numba's code is the faster, as it reads memory at 26 GB/s of 28 where inductor's reads 16 to 23.  In bfloat16
inductor's sums are slow on some processors: a node of Mamba-2 129M takes 29.8 ms on one thread of an AMD processor (Zen
5), 9.6 by numba's code, and 16.8 on two, 8.8 by oneDNN.

Where oneDNN does not pack bfloat16, as on x86 without AVX-512, torch multiplies by it slowly: up to 16 rows run by
numba's code on any number of threads, more of them in float32 by pieces of the weight, in 0.27 of the time for 64.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import count
from typing import Any
from weakref import ref

import numpy as np
import psutil
import torch
from torch import Tensor, library, nn
from torch._subclasses.fake_tensor import FakeTensor

from stree.kernels.dispatch import host_can_read, module_of
from stree.models.fused.fused_layers import scope
from stree.models.patching import PatchedForward, has_foreign_forward, patch_forward, unpatched_forward

__all__ = ["pack_large_linears", "pack_linears"]

LARGE = 3 << 20  # bytes of a weight that no cache holds
FEW, FEW_OF_LARGE, FEW_IN_BFLOAT16 = 16, 4, 2  # rows, for which numba's products with a weight are the faster
PIECE = 1 << 18  # numbers of a weight that are turned to float32 at once: a cache holds them


@dataclass(frozen=True, slots=True, eq=False)
class _Packing:
    """A weight as it was at some time, and its copy in oneDNN's layout.

    Attributes:
        weight: the tensor that was packed.
        address: of its memory, which no other tensor takes while ``sample`` is a view of it.
        version: number of writes to the weight before it was packed.
        sample: some of its numbers: writes through ``data``, as by peft's merges, have no version.
        sampled: what they were.
        packed: the copy.
    """

    weight: Tensor
    address: int
    version: int
    sample: np.ndarray
    sampled: bytes
    packed: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> _Packing:
        """Pack a weight; if another thread writes to it meanwhile, its version says later that it has changed."""
        version, source = weight._version, weight.detach()
        sample = _in_numpy(source[:: len(source) // 4 + 1, :64])
        sampled, packed = sample.tobytes(), torch.ops.mkldnn._reorder_linear_weight(source)
        return cls(weight, source.data_ptr(), version, sample, sampled, packed)

    def is_of(self, weight: Tensor) -> bool:
        """Whether this is the weight as it is now."""
        is_it = self.weight is weight and self.version == weight._version and self.address == weight.data_ptr()
        return is_it and self.sample.tobytes() == self.sampled


@dataclass(slots=True, eq=False)
class _Stored:
    """A weight that is supported, and numba's product with it.

    Attributes:
        weight: the tensor.
        address: of its memory; what is here holds while the tensor has it.
        most_rows: up to which the product is the faster, on up to ``most_threads`` threads.
        product: made with the first few rows.
    """

    weight: Tensor
    address: int
    most_rows: int
    most_threads: int
    product: Callable[[Tensor], Tensor] | None = None


class PackedWeight:
    """A linear layer's weight, as it is stored and in oneDNN's layout, packed again when the weight has changed.

    Threads read one ``_Packing``, which is replaced as a whole.  Copies and pickles of a model start without it.

    Args:
        copies: whether the weight is copied to oneDNN's layout; if not, torch multiplies what no other code is for.

    Attributes:
        number: by which a compiled function finds it: its inputs are tensors in torch's own layout.
    """

    def __init__(self, copies: bool = True) -> None:
        self.copies = copies
        self.number = number = next(_numbers)
        self._packing: _Packing | None = None
        self._stored: _Stored | None = None
        self._lock = threading.Lock()  # of the thread that packs
        _by_number[number] = ref(self, lambda _: _by_number.pop(number, None))

    def __reduce__(self) -> Any:
        return PackedWeight, (self.copies,)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """Compute x weight^T + bias: float[..., out] of float[..., in]; None for a weight that is not supported."""
        stored = self._stored
        if stored is None or stored.weight is not weight or stored.address != weight.data_ptr():
            if not _is_supported(weight):
                return None
            self._stored = stored = _Stored(weight, weight.data_ptr(), *_limits(weight, self.copies))
        is_few = 0 < x.numel() <= stored.most_rows * x.shape[-1]
        if is_few and host_can_read(x) and torch.get_num_threads() <= stored.most_threads:
            product = stored.product = stored.product or _product_of_few(weight)
            y = product(x)
        elif _onednn_packs(weight.dtype):
            return self._packed_product(x, weight, bias) if self.copies else nn.functional.linear(x, weight, bias)
        else:
            y = _in_float32(x, weight)
        return (y if bias is None else y.add_(bias)).to(x.dtype)

    def _packed_product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute x weight^T + bias with the packed copy, or by MKL where that is the faster."""
        packing = self._packing
        if packing is None or not packing.is_of(weight):
            with self._lock:  # another thread may have just packed it
                packing = self._packing
                if packing is None or not packing.is_of(weight):
                    self._packing = packing = _Packing.of(weight)
        rows, mkl_rows = x.numel() // x.shape[-1], _mkl_rows()
        if rows <= mkl_rows and weight.dtype == torch.float32:
            return nn.functional.linear(x, weight, bias)
        if rows in (1, 2) and weight.nbytes >= LARGE and not mkl_rows:  # four are multiplied faster
            repeated = x.reshape(rows, -1).repeat(4 // rows, 1)
            return _product(repeated, packing.packed, bias, "none", [], "")[:rows].view(*x.shape[:-1], -1)
        return _product(x, packing.packed, bias, "none", [], "")


_product: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise
_numbers = count()
_by_number = dict[int, ref[PackedWeight]]()


def pack_linears(model: nn.Module) -> None:
    """Make the linear layers of a CPU model run on packed weights, a second copy in memory, where no gradient is kept.

    A weight is packed when its layer first runs, if oneDNN packs its dtype on this processor.  Layers of subclasses, of
    other dtypes than float32 and bfloat16, quantised ones, those whose forward another library has set, and inference
    tensors, which do not count what is written to them, are left as they are.
    """
    for layer in _to_patch(model):
        _patch(layer, copies=True)


def pack_large_linears(model: nn.Module) -> None:
    """Pack weights of 3 MiB or more, where the copies take no more than half of the memory that is free.

    Others run without a copy: few rows of a tree by numba's code where it is the faster, and bfloat16 that oneDNN does
    not pack.  Plain calls of the model multiply as before by small weights that oneDNN packs.  Time of eager steps over
    that without, one thread of an AMD processor, float32: Mamba-2 129M 0.93 for a node, 0.58 for 4, 0.66 for 16 and
    0.89 for a prompt of 256; a Llama of SmolLM2-135M's sizes 0.90, 0.70, 0.77, 0.92; the bundled pair, of small weights
    (Zen 5), 0.90 to 0.93 for a node, 0.89 to 0.96 for 16, 1.01 to 1.02 for 32, on two threads 0.90 to 0.92, 0.94 to
    0.98, 0.96 to 1.01.
    """
    layers = _to_patch(model)
    copied = [layer.weight for layer in layers if layer.weight.nbytes >= LARGE and _onednn_packs(layer.weight.dtype)]
    has_room = sum(weight.nbytes for weight in copied) <= psutil.virtual_memory().available // 2
    for layer in layers:
        copies = has_room and layer.weight.nbytes >= LARGE
        if copies or not _mkl_rows() or not _onednn_packs(layer.weight.dtype):
            _patch(layer, copies=copies)


def _patch(layer: nn.Linear, *, copies: bool) -> None:
    """Patch a layer, unless it is; a copy that was made stays."""
    forward = layer.__dict__.get("forward")
    has_patch = isinstance(forward, PatchedForward) and forward.func is _forward
    if forward is None or not has_patch or copies > forward.args[-1].copies:
        patch_forward(layer, _forward, PackedWeight(copies))


def _to_patch(model: nn.Module) -> list[nn.Linear]:
    """List the linear layers that can be patched."""
    if not torch.backends.mkldnn.is_available():
        return []
    layers = [module for module in model.modules() if type(module) is nn.Linear and not has_foreign_forward(module)]
    return [layer for layer in layers if _is_supported(layer.weight)]


def _in_numpy(weight: Tensor) -> np.ndarray:
    """Return a weight's memory as an array, of uint16 for the bits of bfloat16, which NumPy does not have."""
    return (weight.view(torch.uint16) if weight.dtype == torch.bfloat16 else weight).numpy()


def _product_of_few(weight: Tensor) -> Callable[[Tensor], Tensor]:
    linear = module_of("stree.kernels.linear.cpu").linear  # imports numba
    return partial(linear, weight=_in_numpy(weight.detach()))


def _is_supported(weight: Tensor) -> bool:  # a quantised weight is of another class
    is_plain = type(weight) is nn.Parameter and not weight.is_inference() and weight.device.type == "cpu"
    return is_plain and weight.dtype in (torch.float32, torch.bfloat16)


@cache
def _onednn_packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs weights of a dtype on this processor; on x86 bfloat16 needs AVX-512 or AVX-NE-CONVERT."""
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@cache
def _mkl_rows() -> int:
    """Return the most rows for which MKL is the faster in float32, as timed with SmolLM2's layers on two cores."""
    capabilities: Any = getattr(torch.cpu, "get_capabilities", dict)()  # older versions of torch have none
    return 3 if capabilities.get("cpu_name", "").startswith("Intel") else 0


def _limits(weight: Tensor, copies: bool) -> tuple[int, int]:
    """Return up to how many rows, and on how many threads, numba's code is the faster for a weight that is supported.

    It has one thread, and was not timed in float32 on Intel's processors.
    """
    is_float32 = weight.dtype == torch.float32
    if not weight.is_contiguous() or (_onednn_packs(weight.dtype) and _mkl_rows()):
        return 0, 0
    if not _onednn_packs(torch.bfloat16):  # x86 without AVX-512
        return FEW, 2 if is_float32 else 1 << 30  # any number of threads
    if not is_float32:
        return FEW_IN_BFLOAT16, 1
    return (FEW_OF_LARGE, 1) if weight.nbytes >= LARGE else (FEW, 1 if copies else 2)


def _in_float32(x: Tensor, weight: Tensor) -> Tensor:
    """Compute x weight^T in float32, by pieces of the weight."""
    wide = x.float()
    pieces = [nn.functional.linear(wide, piece.float()) for piece in weight.split(max(1, PIECE // weight.shape[1]))]
    return torch.cat(pieces, -1)


def _forward(module: Any, before: Any, packed: PackedWeight, /, input: Tensor) -> Tensor:
    x, weight, bias = input, module.weight, module.bias
    # Without a copy of the weight plain calls of the model stay as they were, bit for bit.
    is_ours = packed.copies or scope().in_tree or not _onednn_packs(weight.dtype)
    if is_ours and not torch.is_grad_enabled() and x.dtype == weight.dtype and x.shape[-1:] == weight.shape[1:]:
        if isinstance(x, FakeTensor):
            y = _traced(x, weight, bias, packed.number) if _is_supported(weight) else None
        else:
            y = packed.linear(x, weight, bias)
        if y is not None:
            return y
    return unpatched_forward(module, before)(x)  # type: ignore[no-any-return]


def _traced(x: Tensor, weight: Tensor, bias: Tensor | None, number: int) -> Tensor:
    """Compute x weight^T + bias in a call that is being traced."""
    is_one_row = all(isinstance(size, int) and size == 1 for size in x.shape[:-1])
    suits_numba = weight.nbytes >= LARGE and torch.get_num_threads() <= _limits(weight, copies=True)[1]
    if is_one_row and weight.dtype == torch.float32 and not suits_numba:
        return _one_row(x, weight, bias)
    return torch.ops.stree.packed_linear(x, weight, bias, number)  # type: ignore[no-any-return]


def _one_row(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute x weight^T + bias for one row as a sum over products, which inductor fuses."""
    y = (weight * x.reshape(1, -1)).sum(-1)
    return (y if bias is None else y + bias).view(*x.shape[:-1], -1)


def _linear_of_number(x: Tensor, weight: Tensor, bias: Tensor | None, number: int) -> Tensor:
    packed = _by_number[number]()
    assert packed is not None, "the compiled function's model has it"
    y = packed.linear(x, weight, bias)
    assert y is not None, "the weight was supported when the function was compiled"
    return y


def _shape_of_linear(x: Tensor, weight: Tensor, bias: Tensor | None, number: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


_operators = library.Library("stree", "FRAGMENT")
_operators.define("packed_linear(Tensor x, Tensor weight, Tensor? bias, int number) -> Tensor")
_operators.impl("packed_linear", _linear_of_number, "CPU")
library.register_fake(torch.ops.stree.packed_linear.default, _shape_of_linear)
