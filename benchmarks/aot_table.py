"""Compile the Triton kernels ahead of time, without a GPU, at the shapes of real models: registers, spills, memory.

Run: python benchmarks/aot_table.py [--arch 90] [--nodes 16 64] [--out FILE] [--check]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"  # this program compiles

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from stree.kernels.conv import conv_constants
from stree.kernels.conv_kernels import conv_kernel
from stree.kernels.ssd import ssd_constants
from stree.kernels.ssd_kernels import ssd_kernel
from stree.kernels.tiles import ConvTile, SsdTile

SHARED_LIMIT = {80: 166912, 90: 232448}  # bytes a block may ask for: A100 163 KiB, H100 and H200 227 KiB
NODES = (16, 32, 64, 128)
Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Mixer:
    """Sizes of a model's Mamba-2 layer, from its published configuration."""

    heads: int
    headdim: int
    dstate: int
    groups: int
    width: int = 4

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return self.heads * self.headdim + 2 * self.groups * self.dstate


MIXERS = {
    "mamba2-2.7b": Mixer(80, 64, 128, 1),
    "Nemotron-H-8B": Mixer(128, 64, 128, 8),
    "Bamba-9B": Mixer(128, 64, 128, 1),
    "Granite-4.0-H-tiny": Mixer(48, 64, 128, 1),
    "Falcon-H1-7B": Mixer(24, 128, 256, 1),
    "Zamba2-7B": Mixer(112, 64, 64, 2),
}


@dataclass(frozen=True, slots=True)
class Build:
    """A kernel with the arguments of one launch: constants, and for the rest a type and whether 16 divides it."""

    kernel: Any
    constants: Record
    pointers: dict[str, str]
    integers: dict[str, int]
    tile: Any

    def compile(self, arch: int) -> Record:
        """Compile for an architecture and read what the machine code takes."""
        signature, constants, attributes = {}, dict(self.constants), {}
        for place, name in enumerate(self.kernel.arg_names):
            if name in self.pointers:
                signature[name] = self.pointers[name]
                attributes[(place,)] = [["tt.divisibility", 16]]
            elif name in constants:
                signature[name] = "constexpr"
            elif name in self.integers:
                signature[name] = "i32"
                if self.integers[name] % 16 == 0:
                    attributes[(place,)] = [["tt.divisibility", 16]]
            elif name in ("low", "high"):
                signature[name] = "fp32"
            else:
                signature[name], constants[name] = "constexpr", None
        source = ASTSource(self.kernel, signature, constants, attributes)
        options = {"num_warps": self.tile.warps, "num_stages": self.tile.stages}
        built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        return {"shared_bytes": built.metadata.shared, **_usage(built.asm["cubin"])}


def ssd_build(mixer: Mixer, n: int, dtype: torch.dtype, path: int = 16) -> Build:
    """Describe the launch of a step that folds a path and scores n nodes."""
    tile = SsdTile.of(n, n, path, mixer.headdim, mixer.dstate, dtype)
    constants = ssd_constants(
        tile, mixer.headdim, mixer.dstate, mixer.heads // mixer.groups, n,
        fold=True, scan=True, keep=True, keep_shared=True, known=False, dtype=dtype,
    )  # fmt: skip
    rows = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}[dtype]
    pointers = dict.fromkeys(("state_ptr", "A_ptr", "bias_ptr", "D_ptr", "old_dt_ptr", "stash_dt_ptr"), "*fp32")
    pointers |= dict.fromkeys(
        ("x_ptr", "dt_ptr", "B_ptr", "C_ptr", "y_ptr", "stash_ptr", "old_x_ptr", "old_B_ptr"), rows
    )
    pointers |= {"bits_ptr": "*i32", "path_ptr": "*i64", "lengths_ptr": "*i64"}
    integers = dict.fromkeys((name for name in ssd_kernel.arg_names if name.startswith("stride_")), mixer.channels)
    integers |= {"stride_dt_n": mixer.heads, "stride_old_dt_n": mixer.heads}
    integers |= {"n": n, "first": 0, "new_from": 0, "path_size": path, "nheads": mixer.heads}
    return Build(ssd_kernel, constants, pointers, integers, tile)


def conv_build(mixer: Mixer, n: int, dtype: torch.dtype) -> Build:
    """Describe the launch of a convolution that folds a path and serves n nodes."""
    tile = ConvTile.of(n, mixer.channels)
    constants = conv_constants(tile, mixer.width, fold=True, scan=True, keep=True, silu=True, known=False)
    rows = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}[dtype]
    names = ("window_ptr", "old_ptr", "x_ptr", "weight_ptr", "bias_ptr", "stash_ptr", "y_ptr")
    pointers = dict.fromkeys(names, rows) | {"path_ptr": "*i64", "lengths_ptr": "*i64", "index_ptr": "*i64"}
    integers = dict.fromkeys((name for name in conv_kernel.arg_names if name.startswith("stride_")), mixer.channels)
    integers |= {"n": n, "first": 0, "new_from": 0, "path_size": 16, "channels": mixer.channels}
    return Build(conv_kernel, constants, pointers, integers, tile)


BUILDERS = {"ssd_step": ssd_build, "conv_step": conv_build}


def builds(nodes: Sequence[int], dtypes: Sequence[torch.dtype]) -> Iterator[tuple[Record, Build]]:
    """List every launch of the table with the names that its record has."""
    for op, builder in BUILDERS.items():
        for model, mixer in MIXERS.items():
            for n in nodes:
                for dtype in dtypes:
                    yield {"op": op, "model": model, "nodes": n, "dtype": str(dtype)[6:]}, builder(mixer, n, dtype)


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


def main() -> int:
    """Compile and print the table; with --check, fail on spills at 16-64 nodes and on too much shared memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90])
    parser.add_argument("--nodes", type=int, nargs="+", default=list(NODES))
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--out", type=Path, help="file that the records are written to")
    parser.add_argument("--distinct", action="store_true", help="compile only builds that differ")
    parser.add_argument("--check", action="store_true", help="exit with 1 on spills or too much shared memory")
    options = parser.parse_args()
    records, seen = [], set()
    for arch in options.arch:
        for names, build in builds(options.nodes, [getattr(torch, name) for name in options.dtypes]):
            key = (arch, names["op"], names["dtype"], build.tile)
            if options.distinct and key in seen:
                continue
            seen.add(key)
            record = {**names, "arch": f"sm_{arch}", **build.compile(arch), "warps": build.tile.warps}
            records.append(record)
            print(json.dumps(record), flush=True)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(
            "".join(json.dumps({**record, "triton": triton.__version__}) + "\n" for record in records)
        )
    return int(options.check and any(_is_bad(record) for record in records))


def _is_bad(record: Record) -> bool:
    """Tell whether a record breaks a limit."""
    spills = record["spill_bytes"] > 0 and record["arch"] == "sm_90" and 16 <= record["nodes"] <= 64
    return bool(spills or record["shared_bytes"] > SHARED_LIMIT[int(record["arch"][3:])])


if __name__ == "__main__":
    sys.exit(main())
