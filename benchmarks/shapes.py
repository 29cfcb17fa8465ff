"""Shapes of published models' layers, from their configurations, and the trees that benches score."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Mixer:
    """Sizes of a Mamba-2 layer."""

    heads: int
    headdim: int
    dstate: int
    groups: int
    width: int = 4

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return self.heads * self.headdim + 2 * self.groups * self.dstate


@dataclass(frozen=True, slots=True)
class Delta:
    """Sizes of a gated delta layer; ``per_channel`` is KDA's decay."""

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    per_channel: bool = False


@dataclass(frozen=True, slots=True)
class Selective:
    """Sizes of a diagonal recurrence, Mamba-1 or, without a dstate, RG-LRU, and sequences at once."""

    channels: int
    dstate: int = 1
    batch: int = 1


@dataclass(frozen=True, slots=True)
class Attention:
    """Sizes of an attention layer; latent attention has values that are the first columns of its keys."""

    heads: int
    kv_heads: int
    headdim: int
    latent: int | None = None
    context: int = 4096

    @property
    def value_dim(self) -> int:
        """Columns of a value."""
        return self.headdim if self.latent is None else self.latent


@dataclass(frozen=True, slots=True)
class FeedForward:
    """Channels between the projections of a feed-forward."""

    channels: int
    activation: str = "silu"
    gated: bool = True


@dataclass(frozen=True, slots=True)
class Experts:
    """Sizes of a mixture of gated experts; each row is routed to ``share`` of them."""

    count: int
    share: int
    channels: int
    inner: int


MIXERS = {
    "mamba2-2.7b": Mixer(80, 64, 128, 1),
    "Nemotron-H-8B": Mixer(128, 64, 128, 8),
    "Bamba-9B": Mixer(128, 64, 128, 1),
    "Granite-4.0-H-tiny": Mixer(48, 64, 128, 1),
    "Falcon-H1-7B": Mixer(24, 128, 256, 1),
    "Zamba2-7B": Mixer(112, 64, 64, 2),
}
DELTAS = {
    "Qwen3-Next-80B": Delta(16, 32, 128, 128),
    "Kimi-Linear-48B": Delta(32, 32, 128, 128, per_channel=True),
}
SELECTIVES = {
    "mamba-2.8b": Selective(5120, 16),
    "Falcon-Mamba-7B": Selective(8192, 16),
    "Jamba-mini": Selective(8192, 16),
}
DIAGONALS = {"RecurrentGemma-9B": Selective(4096)}
ATTENTIONS = {
    "Nemotron-H-8B": Attention(32, 8, 128),
    "Bamba-9B": Attention(32, 8, 128),
    "Granite-4.0-H-tiny": Attention(12, 4, 128),
    "Qwen3-Next-80B": Attention(16, 2, 256),
    "Falcon-H1-7B": Attention(12, 2, 128),
    "Zamba2-7B": Attention(32, 32, 224),
    "Jamba-mini": Attention(32, 8, 128),
}
FEED_FORWARDS = {
    "Bamba-9B": FeedForward(14336),
    "Nemotron-H-8B": FeedForward(21504, "relu_squared", gated=False),
    "Granite-4.0-H-tiny": FeedForward(1024),
    "Gemma-3-4B": FeedForward(10240, "gelu_tanh"),
}
EXPERTS = {
    "Granite-4.0-H-tiny": Experts(64, 6, 1536, 512),
    "Qwen3-Next-80B": Experts(512, 10, 2048, 512),
    "Jamba-mini": Experts(16, 2, 4096, 14336),
}
VOCABULARIES = {"vocabulary of 131072": 131072}
LATENTS = {"Kimi-Linear-48B": Attention(32, 1, 576, latent=512)}


TINY: Mapping[type, Mapping[str, Any]] = {
    Mixer: {"tiny": Mixer(2, 16, 16, 1)},
    Delta: {"tiny": Delta(1, 2, 16, 16), "tiny-kda": Delta(2, 2, 16, 16, per_channel=True)},
    Attention: {"tiny": Attention(2, 1, 64, context=160)},
    Selective: {"tiny": Selective(32, 16)},
    FeedForward: {"tiny": FeedForward(40)},
    Experts: {"tiny": Experts(4, 2, 40, 24)},
    int: {"tiny": 50},
}


def tiny(models: Mapping[str, Any]) -> Mapping[str, Any]:
    """Tiny shapes of the same kind."""
    if models is LATENTS:
        return {"tiny-latent": Attention(2, 1, 24, latent=16, context=160)}
    return TINY[type(next(iter(models.values())))]
