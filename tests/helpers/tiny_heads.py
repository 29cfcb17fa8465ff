"""Tiny draft heads in the published layouts, and their targets: MTP layers, one-shot heads and SpecBlock heads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import stree
from helpers.tiny_family_models import BUILDERS, built
from helpers.tiny_models import patched, tiny_model
from stree.models.heads.causal import CausalHead
from stree.models.heads.dflash import OneShotHead, load_dflash
from stree.models.heads.mtp import load_mtp
from stree.models.heads.specblock import SpecBlockHead

BLOCK, MASK, HEADS, KV_HEADS, DIM, RANK, TOP, GROUP = 5, 2, 4, 2, 8, 6, 4, 8
SLOTS = 3  # of a block of SpecBlock


def layer_shapes(hidden: int, queries: int, keys: int, inputs: int | None = None) -> dict[str, Sequence[int]]:
    """Shapes of a layer's weights; its attention reads ``inputs`` channels where they are not ``hidden``."""
    inputs = inputs or hidden
    return {
        "input_layernorm": [hidden], "post_attention_layernorm": [hidden], "self_attn.q_proj": [queries, inputs],
        "self_attn.k_proj": [keys, inputs], "self_attn.v_proj": [keys, inputs], "self_attn.o_proj": [hidden, queries],
        "mlp.gate_proj": [48, hidden], "mlp.up_proj": [48, hidden], "mlp.down_proj": [hidden, 48],
    }  # fmt: skip


def drawn(shapes: dict[str, Sequence[int]]) -> dict[str, Tensor]:
    """Random weights; large, so that errors show."""
    generator = torch.Generator().manual_seed(0)
    found = {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}
    return {name: 1 + 0.2 * x if "norm" in name else x if "codebook" in name else 0.25 * x for name, x in found.items()}


def _write(folder: str | Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    Path(folder).mkdir(exist_ok=True)
    (Path(folder) / "config.json").write_text(json.dumps(config))
    save_file(tensors, Path(folder) / "model.safetensors")
    return Path(folder)


# MTP layers.

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


# One-shot heads.


def block_tensors(kind: str, hidden: int, vocab: int, layers: int = 2) -> dict[str, Tensor]:
    """Random weights of a one-shot head under the published names."""
    shapes: dict[str, Sequence[int]] = {"fc.weight": [hidden, 2 * hidden], "hidden_norm.weight": [hidden]}
    shapes["norm.weight"] = [hidden]
    for index in range(layers):
        layer = layer_shapes(hidden, HEADS * DIM, KV_HEADS * DIM)
        layer |= {"self_attn.q_norm": [DIM], "self_attn.k_norm": [DIM]}
        if kind == "dflash2":
            projection = [4 * hidden // GROUP, hidden]
            layer |= {"attention_conv.kernel_projection": projection, "mlp_conv.kernel_projection": projection}
            for conv in ("attention_conv", "mlp_conv"):
                shapes[f"layers.{index}.{conv}.base_kernel"] = [2, 2, hidden]
        shapes |= {f"layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    if kind in ("dspark", "gated"):
        shapes |= {"markov_head.markov_w1.weight": [vocab, RANK], "markov_head.markov_w2.weight": [vocab, RANK]}
        shapes |= {"confidence_head.proj.weight": [1, hidden + RANK], "confidence_head.proj.bias": [1]}
    if kind == "gated":
        shapes |= {"markov_head.gate_proj.weight": [RANK, hidden + RANK], "markov_head.gate_proj.bias": [RANK]}
    if kind == "dflash2":
        books = {"predecessor_codebook": [vocab, RANK], "successor_codebook": [vocab, RANK]}
        shapes |= {f"candidate_selector.{name}": shape for name, shape in books.items()}
        shapes["candidate_selector.hidden_projection.weight"] = [RANK, hidden]
    return drawn(shapes)


def save_block_head(
    folder: str | Path, target: stree.TreeLM, kind: str = "dflash", layout: str = "z-lab", **changes: Any
) -> Path:
    """Save a one-shot head for a target, whose layers 1 and 2 it reads; ``changes`` are made to the config."""
    hidden = target.model.get_input_embeddings().weight.shape[1]
    sizes = {
        "model_type": "qwen3", "hidden_size": hidden, "num_hidden_layers": 2, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": DIM, "intermediate_size": 48, "rms_norm_eps": 1e-5,
        "vocab_size": target.vocab_size, "rope_theta": 100.0, "max_position_embeddings": 512,
    }  # fmt: skip
    options: dict[str, Any] = {"mask_token_id": MASK, "block_size": BLOCK}
    if kind == "dflash2":
        options |= {"conv_kernel_size": 2, "conv_group_size": GROUP, "selector_rank": RANK}
        options["selector_top_k"] = min(TOP, target.vocab_size - 1)
    if kind in ("dspark", "gated"):
        options |= {"markov_rank": RANK, "markov_head_type": "vanilla" if kind == "dspark" else "gated"}
    if layout == "z-lab":
        names = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel"}
        config = {**sizes, "architectures": [names.get(kind, "Qwen3DSparkModel")], "dflash_config": options}
        options["target_layer_ids"] = [0, 1]
    else:
        config = {"speculators_model_type": "dspark" if kind == "gated" else kind, **options}
        config |= {"transformer_layer_config": sizes, "draft_vocab_size": target.vocab_size}
        config |= {"aux_hidden_state_layer_ids": [1, 2]}
    return _write(folder, config | changes, block_tensors(kind, hidden, target.vocab_size))


@cache
def tiny_target(family: str, vocab_size: int = 97, dtype: torch.dtype = torch.float32) -> stree.TreeLM:
    """Make a random target."""
    torch.manual_seed(0)
    if family in ("mamba2", "bamba", "llama"):
        return stree.TreeLM(tiny_model(family, dtype, vocab_size=vocab_size))
    return stree.TreeLM(built(family, vocab_size=vocab_size).to(dtype))


@cache
def target_and_block_head(
    family: str = "llama", kind: str = "dflash", vocab_size: int = 97, dtype: torch.dtype = torch.float32
) -> tuple[stree.TreeLM, OneShotHead]:
    """Make a target and load a head for it."""
    target = tiny_target(family, vocab_size, dtype)
    return target, load_dflash(save_block_head(mkdtemp(), target, kind), target)


# SpecBlock heads.


def slot_tensors(size: int, draft_vocab: int, slots: int, layers: int = 2) -> dict[str, Tensor]:
    """Random weights of a SpecBlock head under the published names."""
    shapes: dict[str, Sequence[int]] = {
        "input_layer.condition_proj.weight": [size, 3 * size], "input_layer.position_queries.weight": [slots, size],
        "input_layer.fuse.weight": [size, 3 * size], "lm_head.weight": [draft_vocab, size], "norm.weight": [size],
        "rank_head.0.weight": [256, size + 15], "rank_head.2.weight": [4, 256],
        **{f"input_layer.{name}_norm.weight": [size] for name in ("condition", "token", "query")},
        **{f"shift_proj.{index}.weight": [size, 2 * size] for index in range(layers - 1)},
    }  # fmt: skip
    for index in range(layers):
        layer = layer_shapes(size, size, size // HEADS * KV_HEADS)
        shapes |= {f"layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    return drawn(shapes)


def save_slot_head(
    folder: Path, target: stree.TreeLM, *, draft_vocab: int = 60, slots: int = SLOTS, **changes: Any
) -> Any:
    """Save a SpecBlock head for a target, whose layers 1, 2 and 3 it reads; return its weights and its tokens."""
    size = int(target.model.get_input_embeddings().weight.shape[1])
    tensors = slot_tensors(size, draft_vocab, slots)
    tokens = torch.randperm(target.vocab_size, generator=torch.Generator().manual_seed(1))[:draft_vocab].sort().values
    mapping = {"d2t": tokens - torch.arange(draft_vocab), "t2d": torch.zeros(target.vocab_size, dtype=torch.bool)}
    mapping["t2d"][tokens] = True
    config = {
        "architectures": ["LlamaForCausalLMSpecBlockShift"], "model_type": "llama", "hidden_size": size, "head_dim": 99,
        "num_hidden_layers": 2, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "intermediate_size": 48, "vocab_size": target.vocab_size, "rms_norm_eps": 1e-5, "rope_theta": 100.0,
        "rope_scaling": None, "max_position_embeddings": 512, "draft_vocab_size": draft_vocab,
        "diffspec_draft_token_num": slots, "rank_classes": 4,
        "eagle_aux_hidden_state_layer_ids": [1, 2, target.num_layers], **changes,
    }  # fmt: skip
    _write(folder, config, tensors)
    torch.save(mapping, folder / "vocab_mapping.pt")
    return tensors, tokens


@cache
def target_and_slot_head(family: str = "bamba") -> tuple[stree.TreeLM, SpecBlockHead]:
    """Return a tiny target and a head of it that drafts some of its tokens."""
    lm, folder = patched(BUILDERS[family]() if family in BUILDERS else tiny_model(family)), Path(mkdtemp())
    save_slot_head(folder, lm)
    head = stree.heads.load(folder, lm)
    assert isinstance(head, SpecBlockHead)
    return lm, head
