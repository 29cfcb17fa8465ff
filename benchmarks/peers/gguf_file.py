"""Writes a Mamba-2 model of transformers as a GGUF file, in the layout of llama.cpp's converter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch

__all__ = ["write_mamba2"]

NAMES = {
    "norm.weight": "attn_norm.weight",
    "mixer.in_proj.weight": "ssm_in.weight",
    "mixer.conv1d.weight": "ssm_conv1d.weight",
    "mixer.conv1d.bias": "ssm_conv1d.bias",
    "mixer.dt_bias": "ssm_dt.bias",
    "mixer.A_log": "ssm_a",
    "mixer.D": "ssm_d",
    "mixer.norm.weight": "ssm_norm.weight",
    "mixer.out_proj.weight": "ssm_out.weight",
}
LARGE = ("token_embd.weight", "ssm_in.weight", "ssm_out.weight")  # written in the model's dtype, all others in float32


def write_mamba2(model: Any, path: Path) -> None:
    """Write a Mamba2ForCausalLM, float32 or bfloat16, whose head is its embeddings; the tokenizer is empty."""
    config, writer = model.config, gguf.GGUFWriter(path, "mamba2")
    inner = config.num_heads * config.head_dim
    writer.add_context_length(2**20)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(config.state_size)
    writer.add_ssm_time_step_rank(config.num_heads)
    writer.add_ssm_group_count(config.n_groups)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"token {number}" for number in range(config.vocab_size)])
    writer.add_token_types([gguf.TokenType.NORMAL] * config.vocab_size)
    writer.add_token_merges(["a b"])
    for name, weight in _tensors(model).items():
        values = weight.float().numpy()
        if name.split(".", 2)[-1] in LARGE or name in LARGE:
            kind = gguf.GGMLQuantizationType.BF16 if weight.dtype == torch.bfloat16 else gguf.GGMLQuantizationType.F32
            writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(model: Any) -> dict[str, torch.Tensor]:
    """Return the model's weights by llama.cpp's names."""
    backbone = model.backbone
    tensors = {"token_embd.weight": backbone.embeddings.weight, "output_norm.weight": backbone.norm_f.weight}
    for number, layer in enumerate(backbone.layers):
        weights = dict(layer.named_parameters())
        tensors |= {f"blk.{number}.{theirs}": weights[ours] for ours, theirs in NAMES.items()}
    return {name: _as_theirs(name, weight.detach(), model.config) for name, weight in tensors.items()}


def _as_theirs(name: str, weight: torch.Tensor, config: Any) -> torch.Tensor:
    """Return a weight in llama.cpp's shape; decay rates are stored as A, not as its logarithm."""
    if name.endswith("ssm_a"):
        return -weight.float().exp()[:, None]
    if name.endswith("ssm_d"):
        return weight[:, None]
    if name.endswith("ssm_norm.weight"):
        return weight.view(config.n_groups, -1)
    return weight.squeeze(1) if name.endswith("ssm_conv1d.weight") else weight
