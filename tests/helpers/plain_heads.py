"""Forwards of draft heads in plain torch: a one-shot head position by position, a SpecBlock head block by block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from helpers.tiny_heads import DIM, GROUP, HEADS, KV_HEADS, SLOTS

__all__ = ["PlainBlocks", "plain_block"]


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
