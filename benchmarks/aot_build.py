"""One build of a Triton kernel without a GPU: its arguments, and what the machine code takes."""

from __future__ import annotations

import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"  # Triton compiles or interprets, as it stood when it was first imported

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

Record = dict[str, Any]
POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}


@dataclass(frozen=True, slots=True)
class Build:
    """A kernel with the arguments of one launch: constants, and for the rest a type and whether 16 divides it."""

    kernel: Any
    constants: Record
    pointers: dict[str, str]
    integers: dict[str, int]
    tile: Any

    @property
    def switches(self) -> tuple[tuple[str, bool], ...]:
        """What is compiled in or out of the kernel besides the tile."""
        return tuple((name, value) for name, value in sorted(self.constants.items()) if isinstance(value, bool))

    def compile(self, arch: int) -> Record:
        """Compile for an architecture and read what the machine code takes."""
        source = self.source()
        options = {"num_warps": self.tile.warps, "num_stages": self.tile.stages}
        built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        return {"shared_bytes": built.metadata.shared, **_usage(built.asm["cubin"])}

    def source(self) -> ASTSource:
        """Give the kernel with the types of its arguments, as a launch would build it."""
        signature, constants, attributes = {}, dict(self.constants), {}
        unspecialised = {param.name for param in self.kernel.params if param.do_not_specialize}
        for place, name in enumerate(self.kernel.arg_names):
            if name in self.pointers:
                signature[name] = self.pointers[name]
                attributes[(place,)] = [["tt.divisibility", 16]]
            elif name in constants:
                signature[name] = "constexpr"
            elif name in self.integers:
                signature[name] = "i32"
                if self.integers[name] % 16 == 0 and name not in unspecialised:
                    attributes[(place,)] = [["tt.divisibility", 16]]
            elif name in ("low", "high", "scale", "other_scale", "softcap", "eps", "offset", "threshold"):
                signature[name] = "fp32"
            else:
                signature[name], constants[name] = "constexpr", None
        return ASTSource(self.kernel, signature, constants, attributes)


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
