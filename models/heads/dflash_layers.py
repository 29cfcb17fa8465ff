"""Modules of one-shot draft heads, named as the tensors of the published checkpoints.

DFlash (arXiv 2602.06036): layers whose queries come from a block of drafted positions and whose keys and values come
from the context, too.  DFlash2 adds convolutions around every sublayer and a selector; DSpark a bias by the previous
token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding

__all__ = ["BlockAttention", "BlockConfig", "BlockLayer", "BlockModel", "Rotary"]

Rotary = tuple[Tensor, Tensor]  # cosines and sines, float[batch, n, headdim]


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """Sizes and options of a one-shot head.

    Attributes:
        layers: transformers' config of the layers, Qwen3's or one with the same attributes.
        hidden_layers: of the target, whose hidden states are the features; see ``TreeLM``.
        block_size: positions of a block, the anchor among them.
        mask_token_id: token at all positions but the anchor.
        draft_vocab: tokens that can be drafted, or None for all.
        predicts_next: whether position k of a block predicts the token at k + 1, not at k, which leaves out the anchor.
        is_causal: of each layer, whether a position sees only those before it in its block.
        windows: of each layer, the width of sliding attention, or None.
        window_from_anchor: whether a window counts from the anchor, not from each position of the block.
        embedding_scale: factor on the embeddings of a block.
        logit_scale: factor on the logits.
        softcap: logits become softcap * tanh(logits / softcap); 0 for none.
        conv: taps and channels of a group of DFlash2's convolutions, or None.
        selector: rank and candidates of DFlash2's selector, or None.
        markov: rank and kind, "vanilla" or "gated", of DSpark's bias, or None.
    """

    layers: Any
    hidden_layers: tuple[int, ...]
    block_size: int
    mask_token_id: int
    draft_vocab: int | None
    predicts_next: bool
    is_causal: tuple[bool, ...]
    windows: tuple[int | None, ...]
    window_from_anchor: bool
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    softcap: float = 0.0
    conv: tuple[int, int] | None = None
    selector: tuple[int, int] | None = None
    markov: tuple[int, str] | None = None


class BlockAttention(nn.Module):
    """Projections of a layer: queries, keys and values with norms over heads and rotary positions."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        heads, kv_heads, bias = config.num_attention_heads, config.num_key_value_heads, config.attention_bias
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.q_proj = nn.Linear(config.hidden_size, heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * self.head_dim, config.hidden_size, bias=bias)
        self.q_norm = Qwen3RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.head_dim, config.rms_norm_eps)

    def keys_and_values(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Return float[batch, n, kv_heads, headdim] keys and values of float[batch, n, hidden]."""
        keys, values = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.k_proj, self.v_proj))
        return _rotated(self.k_norm(keys), rotary), values

    def forward(self, x: Tensor, rotary: Rotary, keys: Tensor, values: Tensor, is_visible: Tensor) -> Tensor:
        """Attend from float[batch, n, hidden] to float[batch, kv_heads, m, headdim] where bool[batch, n, m] is set."""
        (batch, n, _), kv_heads = x.shape, keys.shape[1]
        queries = _rotated(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))), rotary)
        # The queries of a group of heads share keys, so they are rows of one attention: [batch, kv_heads, group x n].
        queries = queries.view(batch, n, kv_heads, -1, self.head_dim).permute(0, 2, 3, 1, 4)
        group = queries.shape[2]
        mask = is_visible[:, None].repeat(1, 1, group, 1)
        out = F.scaled_dot_product_attention(queries.flatten(2, 3), keys, values, mask, scale=self.head_dim**-0.5)
        out = out.unflatten(2, (group, n)).permute(0, 3, 1, 2, 4).reshape(batch, n, -1)
        mixed: Tensor = self.o_proj(out)
        return mixed


class BlockConv(nn.Module):
    """Causal convolutions before and after a sublayer, within a block.

    Their kernels are constants plus a projection of the sublayer's input, which groups of channels share.
    """

    def __init__(self, hidden_size: int, taps: int, group: int) -> None:
        super().__init__()
        self.group = group
        self.base_kernel = nn.Parameter(torch.empty(2, taps, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * taps * (hidden_size // group), bias=False)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """Run a sublayer on float[batch, n, hidden] between the convolutions."""
        taps = self.base_kernel.shape[1]
        kernels = self.kernel_projection(x).unflatten(-1, (2, taps, -1)).repeat_interleave(self.group, -1)
        before, after = (self.base_kernel + kernels).unbind(2)
        return _convolved(sublayer(_convolved(x, before)), after)


def _convolved(x: Tensor, kernel: Tensor) -> Tensor:
    """Convolve float[batch, n, hidden] with kernels float[batch, n, taps, hidden] of each position."""
    n, taps = x.shape[1], kernel.shape[2]
    shifted = torch.stack([F.pad(x, (0, 0, tap, 0))[:, :n] for tap in range(taps)], 2)
    return (shifted * kernel).sum(2)


class BlockLayer(nn.Module):
    """Attention and feed-forward, each with a norm before it and perhaps convolutions around it."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        sizes = config.layers
        self.self_attn, self.mlp = BlockAttention(sizes), Qwen3MLP(sizes)
        self.input_layernorm = Qwen3RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        if config.conv is not None:
            self.attention_conv = BlockConv(sizes.hidden_size, *config.conv)
            self.mlp_conv = BlockConv(sizes.hidden_size, *config.conv)
        self._has_conv = config.conv is not None

    def forward(self, x: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        """Run float[batch, n, hidden]; ``attend`` runs the attention on the layer's own keys and values."""
        normed = self.input_layernorm(x)
        x = x + (self.attention_conv(normed, attend) if self._has_conv else attend(normed))
        normed = self.post_attention_layernorm(x)
        mixed: Tensor = self.mlp_conv(normed, self.mlp) if self._has_conv else self.mlp(normed)
        return x + mixed


class MarkovHead(nn.Module):
    """DSpark's bias on the logits by the previous token: ``markov_w2(markov_w1(token))``, perhaps gated."""

    def __init__(self, sizes: Any, draft_vocab: int, rank: int, kind: str) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(sizes.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(sizes.hidden_size + rank, rank)
        self._is_gated = kind == "gated"

    def forward(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Return the bias float[batch, n, draft_vocab] after int64[batch, n] tokens at float[batch, n, hidden]."""
        embedded = self.markov_w1(tokens)
        if self._is_gated:
            embedded = torch.sigmoid(self.gate_proj(torch.cat([hidden, embedded], -1))) * embedded
        bias: Tensor = self.markov_w2(embedded)
        return bias


class CandidateSelector(nn.Module):
    """DFlash2's score of a candidate after a token: <A[token] * projected hidden state, B[candidate]>."""

    def __init__(self, sizes: Any, rank: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(sizes.vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.empty(sizes.vocab_size, rank))
        self.hidden_projection = nn.Linear(sizes.hidden_size, rank, bias=False)

    def forward(self, tokens: Tensor, hidden: Tensor, candidates: Tensor) -> Tensor:
        """Score int64[batch, n, k] candidates after int64[batch, n] tokens at float[batch, n, hidden]."""
        before = F.embedding(tokens, self.predecessor_codebook) * self.hidden_projection(hidden)
        scores: Tensor = (before[:, :, None] * F.embedding(candidates, self.successor_codebook)).sum(-1)
        return scores


class BlockModel(nn.Module):
    """All weights of a one-shot head; the embedding is the target's, and the output head where none is its own.

    Weights and rotary frequencies are without data.

    Args:
        config: sizes and options.
    """

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        sizes = config.layers
        with torch.device("meta"):
            self.rotary_emb = Qwen3RotaryEmbedding(sizes)
            self.layers = nn.ModuleList(BlockLayer(config) for _ in range(sizes.num_hidden_layers))
            self.fc = nn.Linear(len(config.hidden_layers) * sizes.hidden_size, sizes.hidden_size, bias=False)
            self.hidden_norm = Qwen3RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
            self.norm = Qwen3RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
            if config.draft_vocab is not None:
                self.lm_head = nn.Linear(sizes.hidden_size, config.draft_vocab, bias=False)
            if config.markov is not None:
                self.markov_head = MarkovHead(sizes, config.draft_vocab or sizes.vocab_size, *config.markov)
            if config.selector is not None:
                self.candidate_selector = CandidateSelector(sizes, config.selector[0])


def _rotated(x: Tensor, rotary: Rotary) -> Tensor:
    """Apply rotary positions to float[batch, n, heads, headdim]."""
    cos, sin = (part[:, :, None] for part in rotary)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin
