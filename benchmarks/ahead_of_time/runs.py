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
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import stree
from benchmarks.ahead_of_time.launches import Build, recorded
from benchmarks.ahead_of_time.whole_step import META, as_on_a_gpu, begun
from stree.bench.records import Record
from stree.growth.names import parse_growth
from stree.verify import VERIFIERS

LINEAR, FULL = "linear_attention", "full_attention"
HYBRID = {"num_hidden_layers": 2, "layer_types": [LINEAR, FULL]}
SSD = {"mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1}
# Published models cut to a layer of each kind: what differs from the defaults of their configuration.
MODELS: dict[str, tuple[str, Record]] = {
    "mamba2-2.7b": ("mamba2", {
        "num_hidden_layers": 2, "hidden_size": 2560, "num_heads": 80, "n_groups": 1, "vocab_size": 50288,
    }),
    "Nemotron-H-8B": ("nemotron_h", {"layers_block_type": [LINEAR, "mlp", FULL], "n_groups": 8}),
    "Bamba-9B": ("bamba", {**SSD, "num_hidden_layers": 2, "attn_layer_indices": [1]}),
    "Granite-4.0-H-tiny": ("granitemoehybrid", {
        **SSD, **HYBRID, "hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 4,
        "intermediate_size": 512, "shared_intermediate_size": 1024, "num_local_experts": 64, "num_experts_per_tok": 6,
        "mamba_n_heads": 48,
    }),
    "Falcon-H1-7B": ("falcon_h1", {
        "num_hidden_layers": 1, "hidden_size": 3072, "num_attention_heads": 12, "num_key_value_heads": 2,
        "head_dim": 128, "mamba_n_heads": 24, "mamba_d_head": 128, "mamba_d_state": 256, "mamba_d_ssm": 3072,
    }),
    "Zamba2-7B": ("zamba2", {
        "num_hidden_layers": 2, "layers_block_type": [LINEAR, "hybrid"], "hidden_size": 3584, "mamba_ngroups": 2,
        "n_mamba_heads": 112, "use_shared_attention_adapter": False,
    }),
    "Falcon-Mamba-7B": ("falcon_mamba", {"hidden_size": 4096, "num_hidden_layers": 2, "time_step_rank": 256}),
    "Jamba-mini": ("jamba", {"num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1}),
    "Zamba-7B": ("zamba", {"num_hidden_layers": 4, "layers_block_type": [LINEAR, "hybrid"] * 2}),
    "Qwen3-Next-80B": ("qwen3_next", HYBRID),
    "OLMo-hybrid-7B": ("olmo_hybrid", HYBRID),
    "Kimi-Linear-48B": ("kimi_linear", {**HYBRID, "mlp_layer_types": ["dense", "sparse"]}),
    "LFM3": ("lfm3", {"num_hidden_layers": 3, "layer_types": ["conv", FULL, "sliding_attention"]}),
    "MiniMax": ("minimax", HYBRID),
    "RecurrentGemma-9B": ("recurrent_gemma", {
        "num_hidden_layers": 3, "num_attention_heads": 16, "hidden_size": 4096, "lru_width": 4096,
    }),
    "Gemma-2-9B": ("gemma2", {"num_hidden_layers": 2, "layer_types": ["sliding_attention", FULL]}),
    "Gemma-3-4B": ("gemma3_text", {"num_hidden_layers": 2, "layer_types": ["sliding_attention", FULL]}),
    "Mistral-7B": ("mistral", {"num_hidden_layers": 1}),
}  # fmt: skip
TINY = {"num_hidden_layers": 1, "hidden_size": 16, "state_size": 16, "head_dim": 16, "num_heads": 2, "n_groups": 1}
GROWTHS = (
    "calibrated", "chain:4", "chain:4+sure:0.3", "stree", "sequoia", "dyspec", "dyspec-heap", "opt-tree",
    "eagle2+depth-stop", "calibrated+decision", "specinfer:2,2,1", "rsdc:2,2,1", "rsds:4,3",
)  # fmt: skip
VERIFIED = ("calibrated", "opt-tree", "specinfer:2,2,1")  # by every verifier: nodes drawn in three ways
VOCABULARIES = (50257, 151936)  # the first one's rows are not aligned
# Nodes and sequences of a step; at 16 sequences attention does not split the context.
SIZES = {torch.bfloat16: [(64, 1), (64, 16), (16, 1), (16, 16)], torch.float32: [(64, 1)]}


def run_builds() -> Iterator[tuple[str, Build]]:
    """Yield the builds of all runs, each with the name of a run that asks for it; the same ones come many times."""
    with torch.inference_mode():
        for dtype, steps in SIZES.items():
            for name, (model_type, changes) in MODELS.items():
                lm = _meta_lm(model_type, dtype, changes)
                for nodes, batch in steps:
                    run = f"{name}, {str(dtype)[6:]}, {batch} x {nodes} nodes"
                    yield from _steps(run, lm, nodes, "calibrated", 0.8, batch=batch)
        for vocab in VOCABULARIES:
            lm = _meta_lm("mamba2", torch.bfloat16, TINY | {"vocab_size": vocab})
            for growth in (*GROWTHS, None):
                run, nodes = f"{growth}, vocabulary of {vocab}", 1 if growth is None else 64
                if growth == "dyspec-heap":
                    nodes = 6  # a draft call for every node
                yield from _steps(f"greedy {run}", lm, nodes, growth, 0.0)
                for verifier in VERIFIERS if growth in VERIFIED else ("auto",):
                    yield from _steps(f"{verifier}, {run}", lm, nodes, growth, 0.8, verifier=verifier)


def _meta_lm(model_type: str, dtype: torch.dtype, sizes: Record) -> stree.TreeLM:
    with META:
        return stree.TreeLM(AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**sizes), dtype=dtype))


def _steps(
    run: str, lm: stree.TreeLM, nodes: int, growth: str | None, temperature: float, **options: Any
) -> Iterator[tuple[str, Build]]:
    """Take the step after a prefill and one after that, the target as its own drafter."""
    environment = mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"})  # lets tensors be on any device
    pointers = mock.patch.object(Tensor, "data_ptr", _data_ptr)
    builds: list[Build] = []
    with as_on_a_gpu(), recorded(builds.append, is_launched=False), environment, pointers:
        program, step = begun(lm, lm, nodes, None if growth is None else parse_growth(growth), temperature, **options)
        step()
        step()
    if program.problem is not None:
        raise program.problem
    for build in builds:
        yield run, build


def _data_ptr(tensor: Tensor) -> int:
    """An address of a meta tensor: its storage, whose alignment is 16, and where it begins there."""
    return int(tensor.untyped_storage()._cdata) // 16 * 16 + int(tensor.storage_offset()) * tensor.element_size()
