"""A stand-alone drafter that fills a window of masked tokens in a few steps (SpecDiff, arXiv 2408.05636).

It reads tokens, no hidden states of the target.  The last tokens of the text are encoded causally, so that in training
one encoding serves windows behind many of its tokens; a window sees them and, in both directions, itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding

from stree.checks import check_sizes
from stree.models.heads.dflash_layers import BlockConfig, BlockLayer
from stree.models.heads.weights import assign, read_tensors
from stree.models.layers.base import state_dtype
from stree.models.tree_lm import TreeLM

__all__ = ["ARCHITECTURE", "DiffusionConfig", "DiffusionNetwork", "MaskedDiffusion", "Sampler", "load_diffusion"]

ARCHITECTURE = "StreeMaskedDiffusion"  # in config.json
HEAD_DIM = 32

# Of a denoising step and float[batch, window, vocab] logits: int64[batch, window] tokens, and their probabilities.
Sampler = Callable[[int, Tensor], tuple[Tensor, Tensor]]
Context = list[tuple[Tensor, Tensor]]  # keys and values of each layer, float[batch, n, kv_heads, headdim]


@dataclass(frozen=True, slots=True)
class DiffusionConfig:
    """Sizes of a masked-diffusion drafter.

    Attributes:
        vocab_size: of the target.
        hidden_size: a multiple of 32.
        num_layers: how many.
        window: tokens that are drafted at once.
        context: most tokens of the text that are read.
        steps: denoising steps of a draft.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    window: int = 8
    context: int = 128
    steps: int = 1

    def __post_init__(self) -> None:
        """Check every value."""
        check_sizes(**asdict(self))
        if self.hidden_size % HEAD_DIM:
            raise ValueError(f"hidden_size must be a multiple of {HEAD_DIM}, got {self.hidden_size}")
        if self.steps > self.window:
            raise ValueError(f"steps must be at most the window's {self.window} tokens, got {self.steps}")


class DiffusionNetwork(nn.Module):
    """The weights: embedding, whose last row is the mask and whose others are the output head, layers and a norm."""

    def __init__(self, config: DiffusionConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        layers = Qwen3Config(
            vocab_size=config.vocab_size, hidden_size=hidden, num_hidden_layers=config.num_layers,
            intermediate_size=3 * hidden, num_attention_heads=hidden // HEAD_DIM, head_dim=HEAD_DIM,
            num_key_value_heads=hidden // HEAD_DIM, max_position_embeddings=config.context + config.window,
        )  # fmt: skip
        plain = BlockConfig(layers, (), config.window, config.vocab_size, None, False, (), (), False)
        self.sizes = config
        self.rotary_emb = Qwen3RotaryEmbedding(layers)
        self.embed_tokens = nn.Embedding(config.vocab_size + 1, hidden)
        self.layers = nn.ModuleList(BlockLayer(plain) for _ in range(config.num_layers))
        self.norm = Qwen3RMSNorm(hidden, layers.rms_norm_eps)

    @property
    def output_weight(self) -> Tensor:
        """float[vocab, hidden], the output head."""
        return self.embed_tokens.weight[:-1]

    def encode(self, tokens: Tensor, is_text: Tensor) -> Context:
        """Run int64[batch, n] tokens causally, of which bool[batch, n] are text, at the positions 0, 1, ..."""
        place = torch.arange(tokens.shape[1], device=tokens.device)
        # Padding attends to itself alone: a softmax over nothing is undefined.
        is_visible = (place <= place[:, None]) & (is_text[:, None] | (place == place[:, None]))
        return self._run(tokens, place[None], is_visible, None)[1]

    def windows(self, tokens: Tensor, positions: Tensor, is_visible: Tensor, context: Context) -> Tensor:
        """Run windows behind a context.

        Args:
            tokens: int64[batch, m]; ``vocab_size`` is the mask.
            positions: int64[m].
            is_visible: bool[batch, m, n + m], which tokens of context and windows each sees.
            context: of n tokens.

        Returns:
            float[batch, m, hidden], which the output head reads.
        """
        hidden: Tensor = self.norm(self._run(tokens, positions[None], is_visible, context)[0])
        return hidden

    def _run(
        self, tokens: Tensor, positions: Tensor, is_visible: Tensor, context: Context | None
    ) -> tuple[Tensor, Context]:
        x: Tensor = self.embed_tokens(tokens)
        rotary, own = self.rotary_emb(x, positions), Context()
        for index, layer in enumerate(self.layers):
            attention: Any = layer.self_attn

            def attend(x: Tensor, index: int = index, attention: Any = attention) -> Tensor:
                own.append(attention.keys_and_values(x, rotary))
                pairs = [own[index]] if context is None else [context[index], own[index]]
                keys, values = (torch.cat(parts, 1).transpose(1, 2) for parts in zip(*pairs, strict=True))
                mixed: Tensor = attention(x, rotary, keys, values, is_visible)
                return mixed

            x = layer(x, attend)
        return x, own


class MaskedDiffusion:
    """A masked-diffusion model that drafts: what `HeadDrafter` uses of a head, without hidden states of the target.

    Args:
        network: the weights, in the target's dtype and on its device.
        steps: denoising steps of a draft, None for those of the network's config.

    Attributes:
        num_drafted: tokens of a window: the depth of the deepest tree.
    """

    defers_commit = fused_layers = fused_mixers = None
    hidden_layers: Any = None  # it reads none

    def __init__(self, network: DiffusionNetwork, steps: int | None = None) -> None:
        self.model, self.config = network.eval(), network.sizes
        self.steps = steps or self.config.steps
        self.vocab_size, self.num_drafted = self.config.vocab_size, self.config.window
        weight = network.embed_tokens.weight
        self.dtype, self.device = weight.dtype, weight.device

    def with_steps(self, steps: int) -> MaskedDiffusion:
        """Return this model with another number of denoising steps.

        Raises:
            ValueError: fewer than one, or more than the window has tokens.
        """
        if not 1 <= steps <= self.num_drafted:
            raise ValueError(f"steps must be in [1, {self.num_drafted}], got {steps}")
        other = copy(self)
        other.steps = steps
        return other

    def trimmed(self, kept: Sequence[int] | Tensor) -> NoReturn:
        """Refuse a trimmed vocabulary: tokens of a window are its inputs, too.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("a masked-diffusion drafter cannot be trimmed")

    @torch.no_grad()
    def denoise(self, tokens: Tensor, is_text: Tensor, sampler: Sampler) -> Tensor:
        """Denoise a window behind each text; return the logits from which its nodes are drawn.

        Each step but the last replaces masks by tokens that ``sampler`` draws, the most probable first, an equal share
        of the window a step; what is in place stays, and nothing of this reads the target.  A position has the logits
        of the last step in which it was masked.  Given the steps these are fixed, so nodes that are drawn from them
        anew, any number at a position, are independent of each other.  The last step's logits where a token is in place
        are no distribution that any token was drawn from.

        Args:
            tokens: int64[batch, context], the last tokens of each text, right-aligned.
            is_text: bool[batch, context], what of them is text.
            sampler: draws the tokens.

        Returns:
            [batch, window, vocab].
        """
        mask, size = self.vocab_size, self.num_drafted
        context = self.model.encode(tokens, is_text)
        window = tokens.new_full((len(tokens), size), mask)
        logits = self.step_logits(window, is_text, context)
        for step in range(1, self.steps):
            drawn, confidence = sampler(step, logits)
            confidence = confidence.masked_fill(window != mask, 2.0)  # above all probabilities
            order = confidence.argsort(dim=1, descending=True, stable=True)[:, : size * step // self.steps]
            is_placed = torch.zeros_like(window, dtype=torch.bool).scatter(1, order, True)
            window = torch.where(is_placed & (window == mask), drawn, window)
            logits = torch.where((window == mask)[..., None], self.step_logits(window, is_text, context), logits)
        return logits

    def step_logits(self, window: Tensor, is_text: Tensor, context: Context) -> Tensor:
        """Run int64[batch, window] tokens and masks behind an encoded text; return [batch, window, vocab] logits."""
        size, n = window.shape[1], is_text.shape[1]
        positions = torch.arange(n, n + size, device=window.device)
        is_visible = torch.cat([is_text, torch.ones_like(window, dtype=torch.bool)], 1)
        hidden = self.model.windows(window, positions, is_visible[:, None].expand(-1, size, -1), context)
        return (hidden @ self.model.output_weight.T).to(state_dtype(self.dtype))


def load_diffusion(target: TreeLM, source: str | Path, published: Any) -> MaskedDiffusion:
    """Load a masked-diffusion drafter.

    Args:
        target: the drafter is placed on its device, in its dtype.
        source: folder or hub id.
        published: its config.json.

    Raises:
        ValueError: the checkpoint cannot be read, or was made for a target of another vocabulary.
    """
    try:
        config = DiffusionConfig(**{name: published[name] for name in DiffusionConfig.__dataclass_fields__})
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"drafter {str(source)!r}: config.json must have the sizes of a drafter: {error}") from error
    if config.vocab_size != target.vocab_size:
        raise ValueError(
            f"drafter {str(source)!r} was made for {config.vocab_size} tokens, the target has {target.vocab_size}"
        )
    with torch.device("meta"):
        network = DiffusionNetwork(config)
    network.rotary_emb = type(network.rotary_emb)(network.rotary_emb.config).to(target.device)
    tensors = read_tensors(source, bool, str(target.device))
    tensors = {f"base.{name}": value.to(target.dtype) for name, value in tensors.items()}
    assign(nn.ModuleDict({"base": network}), tensors, f"drafter {str(source)!r}")
    return MaskedDiffusion(network.requires_grad_(False))


def describe(config: DiffusionConfig) -> str:
    """Write config.json."""
    about = {"architectures": [ARCHITECTURE], "dtype": "bfloat16", **asdict(config)}
    return json.dumps(about, indent=2) + "\n"
