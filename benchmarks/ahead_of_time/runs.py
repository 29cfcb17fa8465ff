"""Record the builds of real runs, without a GPU: whole decoding steps at the layer sizes of published models.

Tensors are on the meta device, which has shapes and no values, and every launch is recorded and skipped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "0"  # read when a kernel is defined: kernels are compiled here, not interpreted

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Mamba2Config, PreTrainedConfig

import stree
from benchmarks.ahead_of_time.launches import Build, recorded
from benchmarks.ahead_of_time.whole_step import META, as_on_a_gpu, begun
from benchmarks.published import CUT, cut
from stree.growth import sized_growth
from stree.verify import VERIFIERS

TINY = {"num_hidden_layers": 1, "hidden_size": 16, "state_size": 16, "head_dim": 16, "num_heads": 2, "n_groups": 1}
GROWTHS = (
    "calibrated", "chain:4", "chain:4+sure:0.3", "stree", "sequoia", "dyspec", "dyspec:form=heap", "opt-tree",
    "eagle2+depth-stop", "calibrated+decision", "specinfer:2,2,1", "rsdc:2,2,1", "rsds:4,3",
)  # fmt: skip
MIXERS = ("mamba2-2.7b", "Nemotron-H-8B", "Falcon-H1-7B")  # Mamba-2 with one and with 8 groups, and wide states
VERIFIED = ("calibrated", "opt-tree", "specinfer:2,2,1")  # by every verifier: nodes drawn in three ways
VOCABULARIES = (50257, 151936)  # the first one's rows are not aligned
# Nodes and sequences of a step; at 16 sequences attention does not split the context.
SIZES = {torch.bfloat16: [(64, 1), (64, 16), (16, 1), (16, 16)], torch.float32: [(64, 1)]}


def run_builds() -> Iterator[tuple[str, Build]]:
    """Yield the builds of all runs, each with the name of a run that asks for it; the same ones come many times."""
    with torch.inference_mode():
        for dtype, steps in SIZES.items():
            for name in CUT:
                lm = _meta_lm(cut(name), dtype)
                for nodes, batch in steps:
                    run = f"{name}, {str(dtype)[6:]}, {batch} x {nodes} nodes"
                    yield from _steps(run, lm, nodes, "calibrated", 0.8, batch=batch)
                if name in MIXERS:
                    lm.fused_mixers = True
                    yield from _steps(f"{name}, {str(dtype)[6:]}, fused mixers", lm, 16, "calibrated", 0.8)
        for vocab in VOCABULARIES:
            lm = _meta_lm(Mamba2Config(**TINY, vocab_size=vocab), torch.bfloat16)
            for growth in (*GROWTHS, None):
                run, nodes = f"{growth}, vocabulary of {vocab}", 1 if growth is None else 64
                if growth == "dyspec:form=heap":
                    nodes = 6  # a draft call for every node
                yield from _steps(f"greedy {run}", lm, nodes, growth, 0.0)
                for verifier in VERIFIERS if growth in VERIFIED else ("auto",):
                    yield from _steps(f"{verifier}, {run}", lm, nodes, growth, 0.8, verifier=verifier)


def _meta_lm(config: PreTrainedConfig, dtype: torch.dtype) -> stree.TreeLM:
    with META:
        return stree.TreeLM(AutoModelForCausalLM.from_config(config, dtype=dtype))


def _steps(
    run: str, lm: stree.TreeLM, nodes: int, growth: str | None, temperature: float, **options: Any
) -> Iterator[tuple[str, Build]]:
    """Take the step after a prefill and one after that, the target as its own drafter."""
    environment = mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"})  # lets tensors be on any device
    pointers = mock.patch.object(Tensor, "data_ptr", _data_ptr)
    builds: list[Build] = []
    with as_on_a_gpu(), recorded(builds.append, is_launched=False), environment, pointers:
        program, step = begun(lm, lm, nodes, sized_growth(growth, None)[0], temperature, **options)
        step()
        step()
    if program.problem is not None:
        raise program.problem
    for build in builds:
        yield run, build


def _data_ptr(tensor: Tensor) -> int:
    """An address of a meta tensor: its storage, whose alignment is 16, and where it begins there."""
    return int(tensor.untyped_storage()._cdata) // 16 * 16 + int(tensor.storage_offset()) * tensor.element_size()
