"""Record which builds the launches of Triton kernels ask for, without a GPU, and compile them.

Operations run on meta tensors, which have shapes and no values, and every launch is recorded and skipped.  A record has
the types, divisibilities, constants and options that Triton would pass to its compiler for that launch.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "0"  # read when a kernel is defined: kernels are compiled here, not interpreted

import torch
import triton
from torch import Tensor
from transformers import AutoModelForCausalLM, Mamba2Config
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

import stree
from benchmarks.ahead_of_time.whole_step import META, as_on_a_gpu, begun
from benchmarks.gpu.cases import KINDS, cases
from stree.bench.records import Record


@dataclass(frozen=True)
class Build:
    """One build of a kernel: the arguments of Triton's compiler."""

    kernel: Any
    signature: Record
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    warps: int
    stages: int

    @property
    def name(self) -> str:
        """Name of the kernel."""
        return str(self.kernel.__name__)

    @property
    def switches(self) -> tuple[Any, ...]:
        """Options and on/off constants, which select different code."""
        flags = [(str(path), value) for path, value in self.constants.items() if isinstance(value, bool)]
        return self.warps, self.stages, *sorted(flags)

    @property
    def source(self) -> ASTSource:
        """The kernel with the types of its arguments."""
        return ASTSource(self.kernel, self.signature, self.constants, self.attributes)

    def compile(self, arch: int) -> Record:
        """Compile for compute capability ``arch``: bytes of shared memory, registers and spilled bytes a thread."""
        options = {"num_warps": self.warps, "num_stages": self.stages}
        built = triton.compile(self.source, target=GPUTarget("cuda", arch, 32), options=options)
        return {"shared_bytes": built.metadata.shared, **_usage(built.asm["cubin"]), "warps": self.warps}


def _usage(cubin: bytes) -> Record:
    """Read registers and spilled bytes a thread from machine code, as cuobjdump reports them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    words = (done.stdout + done.stderr).replace("\n", " ").split()
    found = {key: int(value) for key, _, value in (word.partition(":") for word in words) if value.isdigit()}
    return {"registers": found["REG"], "spill_bytes": found["STACK"] + found.get("LOCAL", 0)}


def _data_ptr(tensor: Tensor) -> int:
    """An address of a meta tensor: its storage, whose alignment is 16, and where it begins there."""
    return int(tensor.untyped_storage()._cdata) // 16 * 16 + int(tensor.storage_offset()) * tensor.element_size()


@contextmanager
def recorded() -> Iterator[list[Build]]:
    """Collect the builds of all launches inside instead of launching; "auto" means Triton on any device."""
    found: list[Build] = []
    backend = make_backend(GPUTarget("cuda", 90, 32))

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        if "WIDE" in kwargs:
            kwargs["WIDE"] = False  # a widening that the interpreter needs
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        bound, specialization, rest = bind(*args, **kwargs)
        options, signature, constants, attributes = kernel._pack_args(backend, kwargs, bound, specialization, rest)
        found.append(Build(kernel, signature, constants, attributes, options.num_warps, options.num_stages))

    triton.knobs.runtime.interpret = False  # for kernels that are first imported below, whatever the environment says
    environment = mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"})  # lets tensors be on any device
    patches = mock.patch.object(JITFunction, "run", run), mock.patch.object(Tensor, "data_ptr", _data_ptr)
    with as_on_a_gpu(), environment, patches[0], patches[1]:
        yield found


def operation_builds(n: int, dtype: torch.dtype) -> Iterator[tuple[Record, Build]]:
    """Builds of every operation of a model's layers for trees of n nodes, with operation and model."""
    with recorded() as found, torch.inference_mode():
        for case in cases(KINDS, [(1, n)], dtype, META):
            found.clear()  # the indices of its tree are made by every case
            case.providers["triton"](case.make(None))
            for build in found:
                yield {"op": case.op, "model": case.params["model"]}, build


def step_builds(n: int, vocab: int, dtype: torch.dtype) -> list[Build]:
    """Builds of a whole decoding step with n nodes, greedy and sampled: drafting, verify, accept, commit, emit."""
    with recorded() as found, torch.inference_mode():
        for temperature in (0.0, 0.8):
            _, step = begun(_tiny_lm(vocab, dtype), _tiny_lm(vocab, dtype), n, min(6, n - 1), temperature)
            step()
    return found


def _tiny_lm(vocab: int, dtype: torch.dtype) -> stree.TreeLM:
    config = Mamba2Config(
        num_hidden_layers=1, hidden_size=16, state_size=16, head_dim=16, num_heads=2, n_groups=1, vocab_size=vocab,
    )  # fmt: skip
    with META:
        return stree.TreeLM(AutoModelForCausalLM.from_config(config, dtype=dtype))
