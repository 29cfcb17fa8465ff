"""Targets and drafters of the GPU scripts: shapes of published models, with random weights."""

from __future__ import annotations

import gc

import torch
from transformers import AutoModelForCausalLM, BambaConfig, Mamba2Config, PreTrainedConfig

import stree
from benchmarks.published import WHOLE, whole

__all__ = ["DRAFTERS", "DTYPES", "configurations", "free", "model_of"]

DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}
KEPT_LAYERS = {"Qwen3-Next-80B": 12}  # a quarter of the model, 40 GB, fits
# A drafter a twentieth of the target's size.
DRAFTERS = {"mamba2-2.7b": "mamba2-130m", "Nemotron-H-8B": "mamba2-400m", "tiny-mamba2": "tiny-drafter"}


def configurations(smoke: bool) -> dict[str, PreTrainedConfig]:
    """Configurations of the models: published ones, or tiny ones of the same kinds."""
    if smoke:
        small = Mamba2Config(num_hidden_layers=2, hidden_size=32, state_size=16, head_dim=16, num_heads=4, n_groups=1,
                             vocab_size=64, chunk_size=16)  # fmt: skip
        hybrid = BambaConfig(num_hidden_layers=2, hidden_size=32, intermediate_size=32, num_attention_heads=2,
                             num_key_value_heads=1, attn_layer_indices=[1], mamba_n_heads=4, mamba_d_head=16,
                             mamba_d_state=16, vocab_size=64, mamba_chunk_size=16)  # fmt: skip
        drafter = Mamba2Config(num_hidden_layers=1, hidden_size=16, state_size=8, head_dim=16, num_heads=2, n_groups=1,
                               vocab_size=64, chunk_size=16)  # fmt: skip
        return {"tiny-mamba2": small, "tiny-drafter": drafter, "tiny-bamba": hybrid}
    drafters = {"mamba2-130m": _mamba2(768, 24, 50288), "mamba2-400m": _mamba2(1024, 40, 131072)}
    return {"mamba2-2.7b": whole("mamba2-2.7b"), **drafters} | {_name(name): _kept(name) for name in WHOLE}


def _mamba2(width: int, layers: int, vocab: int) -> PreTrainedConfig:
    """Make a Mamba-2 as mamba-ssm's published ones are."""
    return Mamba2Config(hidden_size=width, num_hidden_layers=layers, num_heads=width // 32, vocab_size=vocab,
                        n_groups=1, tie_word_embeddings=True)  # fmt: skip


def _name(model: str) -> str:
    """Name of a model, with the number of layers where only a part of it is run."""
    return f"{model}, {KEPT_LAYERS[model]} layers" if model in KEPT_LAYERS else model


def _kept(model: str) -> PreTrainedConfig:
    """Keep the first layers of a model, all if it has no entry in ``KEPT_LAYERS``."""
    config = whole(model)
    if model in KEPT_LAYERS:
        config.num_hidden_layers = KEPT_LAYERS[model]
        config.layer_types = config.layer_types[: KEPT_LAYERS[model]]
    return config


def model_of(config: PreTrainedConfig, device: torch.device) -> stree.TreeLM:
    """Make a model with random weights."""
    with torch.device(device):
        return stree.TreeLM(AutoModelForCausalLM.from_config(config, dtype=DTYPES[device.type]))


def free(device: torch.device) -> None:
    """Return the memory of models that nothing refers to any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
