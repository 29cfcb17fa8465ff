"""Tiny SpecBlock heads in the published layout, and their forward in plain torch, block by block."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import linear, silu

import stree
from helpers.tiny_families_delta import BUILDERS
from helpers.tiny_models import patched, tiny_model
from stree.models.heads.specblock import SpecBlockHead

__all__ = ["PlainBlocks", "save_head", "target_and_slot_head", "tensors_of"]

HEADS, KV_HEADS, VOCAB, SLOTS = 4, 2, 97, 3


def tensors_of(size: int, draft_vocab: int, slots: int, layers: int = 2) -> dict[str, Tensor]:
    """Random weights under the published names; large, so that errors show."""
    kv_size = size // HEADS * KV_HEADS
    shapes: dict[str, Sequence[int]] = {
        "input_layer.condition_proj.weight": [size, 3 * size], "input_layer.position_queries.weight": [slots, size],
        "input_layer.fuse.weight": [size, 3 * size], "lm_head.weight": [draft_vocab, size], "norm.weight": [size],
        "rank_head.0.weight": [256, size + 15], "rank_head.2.weight": [4, 256],
        **{f"input_layer.{name}_norm.weight": [size] for name in ("condition", "token", "query")},
        **{f"shift_proj.{index}.weight": [size, 2 * size] for index in range(layers - 1)},
    }  # fmt: skip
    for index in range(layers):
        layer = {
            "input_layernorm": [size], "post_attention_layernorm": [size], "self_attn.q_proj": [size, size],
            "self_attn.k_proj": [kv_size, size], "self_attn.v_proj": [kv_size, size],
            "self_attn.o_proj": [size, size], "mlp.gate_proj": [48, size], "mlp.up_proj": [48, size],
            "mlp.down_proj": [size, 48],
        }  # fmt: skip
        shapes |= {f"layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    generator = torch.Generator().manual_seed(0)
    drawn = {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}
    return {name: 1 + 0.2 * x if "norm" in name else 0.25 * x for name, x in drawn.items()}


def save_head(folder: Path, target: stree.TreeLM, *, draft_vocab: int = 60, slots: int = SLOTS, **changes: Any) -> Any:
    """Write a head for a target, whose layers 1, 2 and 3 it reads; return its weights and its tokens."""
    size = int(target.model.get_input_embeddings().weight.shape[1])
    tensors = tensors_of(size, draft_vocab, slots)
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
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    torch.save(mapping, folder / "vocab_mapping.pt")
    return tensors, tokens


@cache
def target_and_slot_head(family: str = "bamba") -> tuple[stree.TreeLM, SpecBlockHead]:
    """Return a tiny target and a head of it that drafts some of its tokens."""
    lm, folder = patched(BUILDERS[family]() if family in BUILDERS else tiny_model(family)), Path(mkdtemp())
    save_head(folder, lm)
    head = stree.heads.load(folder, lm)
    assert isinstance(head, SpecBlockHead)
    return lm, head


class PlainBlocks:
    """Blocks behind a text, one by one, in float64.

    Args:
        weights: under the published names.
        embedding: of the target.
        slots: of a block.
        heads: of queries, and of keys.
        theta: of rotary positions.
        eps: of norms.
    """

    def __init__(
        self, weights: dict[str, Tensor], embedding: Tensor, slots: int = SLOTS,
        heads: tuple[int, int] = (HEADS, KV_HEADS), theta: float = 100.0, eps: float = 1e-5,
    ) -> None:  # fmt: skip
        self.weights = {name: weight.double() for name, weight in weights.items()}
        self.embedding, self.slots, self.heads, self.theta, self.eps = embedding.double(), slots, heads, theta, eps
        self.keys: list[list[Tensor]] = [[], []]  # of each layer and column: float[kv heads, dim]
        self.values: list[list[Tensor]] = [[], []]

    def project(self, hidden: Tensor) -> Tensor:
        """Features of the target's hidden states, side by side."""
        return linear(hidden.double(), self.weights["input_layer.condition_proj.weight"])

    def block(self, token: int, condition: Tensor, position: int, visible: Sequence[int]) -> tuple[Tensor, list[int]]:
        """Run a block that sees some columns; return float[slots, hidden] outputs, and its columns."""
        w, columns, outputs = self.weights, [len(self.keys[0]) + slot for slot in range(self.slots)], list[Tensor]()
        before = list[Tensor]()
        for slot in range(self.slots):
            parts = [
                self._norm(condition, "input_layer.condition_norm"),
                self._norm(self.embedding[token], "input_layer.token_norm"),
                self._norm(w["input_layer.position_queries.weight"][slot], "input_layer.query_norm"),
            ]
            outputs.append(linear(torch.cat(parts), w["input_layer.fuse.weight"]))
        for layer in range(2):
            if layer:
                before = [outputs[max(slot - 1, 0)] for slot in range(self.slots)]
                outputs = [
                    linear(torch.cat(pair), w["shift_proj.0.weight"]) for pair in zip(outputs, before, strict=True)
                ]
            for slot, x in enumerate(outputs):
                outputs[slot] = self._layer(layer, x, position + slot, [*visible, *columns[:slot]])
        return torch.stack(outputs), columns

    def logits(self, output: Tensor) -> Tensor:
        """Logits over the draft vocabulary."""
        return linear(self._norm(output, "norm"), self.weights["lm_head.weight"])

    def rank(self, output: Tensor) -> int:
        """Class of the rank head."""
        return int(self.rank_logits(output).argmax())

    def rank_logits(self, output: Tensor) -> Tensor:
        """Logits of the rank head."""
        top = sorted(self.logits(output).tolist(), reverse=True)[:20]
        logprobs = torch.tensor(top, dtype=torch.float64).log_softmax(0)
        found = [*logprobs[:10].tolist(), top[0] - top[1], top[0] - top[2], top[0] - top[4], float(logprobs[0].exp())]
        found.append(float(-(logprobs.exp() * logprobs).sum()))
        x = torch.cat([self._norm(output, "norm"), torch.tensor(found, dtype=torch.float64)])
        hidden = silu(linear(x, self.weights["rank_head.0.weight"]))
        return linear(hidden, self.weights["rank_head.2.weight"])

    def _layer(self, layer: int, x: Tensor, position: int, visible: Sequence[int]) -> Tensor:
        def of(name: str, y: Tensor) -> Tensor:
            return linear(y, self.weights[f"layers.{layer}.{name}.weight"])

        y = self._norm(x, f"layers.{layer}.input_layernorm")
        heads, kv_heads = self.heads
        dim = len(x) // heads
        q, k, v = (of(f"self_attn.{name}_proj", y).view(-1, dim) for name in "qkv")
        self.keys[layer].append(_rotated(k, position, self.theta))
        self.values[layer].append(v)
        seen = [*visible, len(self.keys[layer]) - 1]
        keys, values = (
            torch.stack([of_layer[layer][column] for column in seen]) for of_layer in (self.keys, self.values)
        )
        group, mixed = heads // kv_heads, list[Tensor]()
        for head, query in enumerate(_rotated(q, position, self.theta)):
            weights = (keys[:, head // group] @ query / dim**0.5).softmax(0)
            mixed.append(weights @ values[:, head // group])
        x = x + of("self_attn.o_proj", torch.cat(mixed))
        y = self._norm(x, f"layers.{layer}.post_attention_layernorm")
        return x + of("mlp.down_proj", silu(of("mlp.gate_proj", y)) * of("mlp.up_proj", y))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weights[f"{name}.weight"]


def _rotated(x: Tensor, position: int, theta: float) -> Tensor:
    """Rotate float[heads, dim] queries or keys by a position."""
    half = x.shape[1] // 2
    angles = position * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    low, high = x[:, :half], x[:, half:]
    return torch.cat([low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()], 1)
