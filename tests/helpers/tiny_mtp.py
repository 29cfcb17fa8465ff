"""Tiny targets whose checkpoints hold MTP layers, in the layout of the published ones."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import stree
from helpers.tiny_families_delta import BUILDERS
from stree.models.heads.causal import CausalHead

__all__ = ["save_with_mtp", "target_and_head"]


def save_with_mtp(folder: str | Path, family: str = "qwen3_next", **changes: Any) -> Path:
    """Save a random Qwen3-Next or Qwen3.5 whose second layer, attention, lends its shapes to an MTP layer."""
    torch.manual_seed(0)
    model = BUILDERS[family](**changes)
    model.save_pretrained(folder)
    file, size = Path(folder) / "model.safetensors", model.config.hidden_size
    tensors = load_file(file)
    for name, weight in list(tensors.items()):
        if name.startswith("model.layers.1."):
            tensors[name.replace("model.layers.1.", "mtp.layers.0.")] = 0.2 * torch.randn_like(weight)
    tensors["mtp.fc.weight"] = 0.2 * torch.randn(size, 2 * size)
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        tensors[f"mtp.{name}.weight"] = 0.1 * torch.randn(size)
    save_file(tensors, file, metadata={"format": "pt"})
    return Path(folder)


@cache
def target_and_head(
    family: str = "qwen3_next", vocab_size: int = 97, dtype: torch.dtype = torch.float32
) -> tuple[stree.TreeLM, CausalHead]:
    """Load such a target and its head."""
    target = stree.TreeLM.from_pretrained(save_with_mtp(mkdtemp(), family, vocab_size=vocab_size), "cpu", dtype)
    return target, stree.heads.load("mtp", target)
