"""Tiny one-shot heads in the published layouts, and their forward in plain torch, position by position."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor

import stree
from helpers.tiny_family_models import built
from helpers.tiny_models import tiny_model
from stree.models.heads.dflash import OneShotHead, load_dflash

__all__ = [
    "DIM",
    "GROUP",
    "HEADS",
    "KV_HEADS",
    "MASK",
    "RANK",
    "TOP",
    "plain_block",
    "save_head",
    "target_and_block_head",
    "tensors_of",
    "tiny_target",
]

BLOCK, MASK, HEADS, KV_HEADS, DIM, RANK, TOP, GROUP = 5, 2, 4, 2, 8, 6, 4, 8


def tensors_of(kind: str, hidden: int, vocab: int, layers: int = 2) -> dict[str, Tensor]:
    """Random weights under the published names; large, so that errors show."""
    shapes: dict[str, Sequence[int]] = {"fc.weight": [hidden, 2 * hidden], "hidden_norm.weight": [hidden]}
    shapes["norm.weight"] = [hidden]
    for index in range(layers):
        layer = {
            "input_layernorm": [hidden], "post_attention_layernorm": [hidden], "self_attn.q_norm": [DIM],
            "self_attn.k_norm": [DIM], "self_attn.q_proj": [HEADS * DIM, hidden],
            "self_attn.k_proj": [KV_HEADS * DIM, hidden], "self_attn.v_proj": [KV_HEADS * DIM, hidden],
            "self_attn.o_proj": [hidden, HEADS * DIM], "mlp.gate_proj": [48, hidden], "mlp.up_proj": [48, hidden],
            "mlp.down_proj": [hidden, 48],
        }  # fmt: skip
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
    generator = torch.Generator().manual_seed(0)
    drawn = {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}
    return {name: 1 + 0.2 * x if "norm" in name else x if "codebook" in name else 0.25 * x for name, x in drawn.items()}


def save_head(
    folder: str | Path, target: stree.TreeLM, kind: str = "dflash", layout: str = "z-lab", **changes: Any
) -> Path:
    """Save a head for a target, whose layers 1 and 2 it reads; ``changes`` are made to the config."""
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
    Path(folder).mkdir(exist_ok=True)
    (Path(folder) / "config.json").write_text(json.dumps(config | changes))
    save_file(tensors_of(kind, hidden, target.vocab_size), Path(folder) / "model.safetensors")
    return Path(folder)


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
    return target, load_dflash(save_head(mkdtemp(), target, kind), target)


def plain_block(
    tensors: dict[str, Tensor],
    features: Tensor,
    embedded: Tensor,
    *,
    is_causal: bool = False,
    window: int | None = None,
    neighbours: bool = False,
) -> Tensor:
    """Hidden states of a block, float[block, hidden]: the definition of DFlash's forward, for one text.

    Args:
        tensors: of the checkpoint.
        features: float[n, width], the target's hidden states at the context.
        embedded: float[block, hidden], of the anchor and the masks.
        is_causal: whether a position sees only those before it in the block.
        window: of sliding attention.
        neighbours: whether rotary pairs are neighbours.
    """
    context = _norm(features @ tensors["fc.weight"].T, tensors["hidden_norm.weight"])
    n, block, x = len(context), len(embedded), embedded
    for index in range(2):
        part = {
            name.removeprefix(f"layers.{index}."): value
            for name, value in tensors.items()
            if name.startswith(f"layers.{index}.")
        }

        def attend(y: Tensor, part: dict[str, Tensor] = part) -> Tensor:
            def heads(z: Tensor, which: str, begin: int) -> Tensor:
                z = (z @ part[f"self_attn.{which}_proj.weight"].T).view(len(z), -1, DIM)
                if which == "v":
                    return z
                z = _norm(z, part[f"self_attn.{which}_norm.weight"])
                return torch.stack([_turned(z[place], begin + place, neighbours) for place in range(len(z))])

            q = heads(y, "q", n)
            k, v = (torch.cat([heads(context, which, 0), heads(y, which, n)]) for which in "kv")
            rows = []
            for place in range(block):
                seen = [
                    key for key in range(n + block)
                    if (not is_causal or key <= n + place) and (window is None or abs(n + place - key) < window)
                ]  # fmt: skip
                outs = []
                for head in range(HEADS):
                    group = head // (HEADS // KV_HEADS)
                    weights = (k[seen, group] @ q[place, head] / DIM**0.5).softmax(0)
                    outs.append(weights @ v[seen, group])
                rows.append(torch.cat(outs))
            return torch.stack(rows) @ part["self_attn.o_proj.weight"].T

        def feed(y: Tensor, part: dict[str, Tensor] = part) -> Tensor:
            gate = torch.nn.functional.silu(y @ part["mlp.gate_proj.weight"].T)
            return (gate * (y @ part["mlp.up_proj.weight"].T)) @ part["mlp.down_proj.weight"].T

        x = x + _between(part, "attention_conv", _norm(x, part["input_layernorm.weight"]), attend)
        x = x + _between(part, "mlp_conv", _norm(x, part["post_attention_layernorm.weight"]), feed)
    return _norm(x, tensors["norm.weight"])


def _between(part: dict[str, Tensor], conv: str, x: Tensor, sublayer: Any) -> Tensor:
    """Run a sublayer, between convolutions if it has them."""
    if f"{conv}.base_kernel" not in part:
        return cast(Tensor, sublayer(x))
    base, drawn = part[f"{conv}.base_kernel"], x @ part[f"{conv}.kernel_projection.weight"].T
    kernels = drawn.view(len(x), 2, 2, -1)  # position, side, tap, group

    def convolve(y: Tensor, side: int) -> Tensor:
        out = torch.zeros_like(y)
        for place in range(len(y)):
            for channel in range(y.shape[1]):
                for tap in range(min(place + 1, 2)):
                    weight = base[side, tap, channel] + kernels[place, side, tap, channel // GROUP]
                    out[place, channel] += weight * y[place - tap, channel]
        return out

    return convolve(sublayer(convolve(x, 0)), 1)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def _turned(x: Tensor, position: int, neighbours: bool) -> Tensor:
    """Turn pairs of float[heads, DIM] by their angles at a position."""
    out = x.clone()
    for pair in range(DIM // 2):
        angle = torch.tensor(position * 100.0 ** (-2 * pair / DIM), dtype=x.dtype)
        one, two = (2 * pair, 2 * pair + 1) if neighbours else (pair, pair + DIM // 2)
        out[:, one] = x[:, one] * angle.cos() - x[:, two] * angle.sin()
        out[:, two] = x[:, two] * angle.cos() + x[:, one] * angle.sin()
    return out
