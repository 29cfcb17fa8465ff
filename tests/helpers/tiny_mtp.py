"""Tiny targets whose checkpoints hold MTP layers, in the layout of the published ones."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import stree
from helpers.tiny_family_models import built
from stree.models.heads.causal import CausalHead
from stree.models.heads.mtp import load_mtp

__all__ = ["save_with_mtp", "target_and_head"]

# By family: the layers that lend their shapes to MTP layers, what their names become, and names of fusion and norms.
LAYOUTS: dict[str, tuple[dict[str, str], tuple[str, ...], str]] = {
    "qwen3_next": (
        {"model.layers.1.": "mtp.layers.0."}, ("mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden"),
        "mtp.norm",
    ),
    "nemotron_h": (
        {"backbone.layers.2.": "mtp.layers.0.", "backbone.layers.3.": "mtp.layers.1."},
        ("mtp.layers.0.eh_proj", "mtp.layers.0.enorm", "mtp.layers.0.hnorm"), "mtp.layers.1.final_layernorm",
    ),
    "bailing_hybrid": (
        {"model.layers.1.": "model.layers.3."},
        ("model.layers.3.eh_proj", "model.layers.3.enorm", "model.layers.3.hnorm"), "model.layers.3.final_layernorm",
    ),
}  # fmt: skip
LAYOUTS["qwen3_5_text"] = LAYOUTS["qwen3_5_moe_text"] = LAYOUTS["qwen3_next"]


def save_with_mtp(folder: str | Path, family: str = "qwen3_next", **changes: Any) -> Path:
    """Save a random target, and MTP layers of the shapes of its own attention layer, in the family's layout."""
    torch.manual_seed(0)
    model = built(family, **changes)
    model.save_pretrained(folder)
    file, size = Path(folder) / "model.safetensors", model.config.hidden_size
    tensors, (lent, (fc, *norms), norm) = load_file(file), LAYOUTS[family]
    for name, weight in list(tensors.items()):
        for prefix, ours in lent.items():
            if name.startswith(prefix):
                tensors[name.replace(prefix, ours)] = 0.2 * torch.randn_like(weight)
    tensors[f"{fc}.weight"] = 0.2 * torch.randn(size, 2 * size)
    for name in (*norms, norm):
        tensors[f"{name}.weight"] = 0.8 + 0.2 * torch.randn(size)
    save_file(tensors, file, metadata={"format": "pt"})
    return Path(folder)


@cache
def target_and_head(
    family: str = "qwen3_next", vocab_size: int = 97, dtype: torch.dtype = torch.float32
) -> tuple[stree.TreeLM, CausalHead]:
    """Load such a target and its head."""
    target = stree.TreeLM.from_pretrained(save_with_mtp(mkdtemp(), family, vocab_size=vocab_size), "cpu", dtype)
    if dtype == torch.float64:
        target.model.set_experts_implementation("eager")  # torch's grouped products do not take float64
    return target, load_mtp(target)
