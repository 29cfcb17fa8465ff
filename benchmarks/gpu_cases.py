"""What the GPU suite times: every operation at published shapes, and at tiny ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from gpu_case import Case, Inputs, copied
from gpu_pointwise_cases import activation_case, delta_inputs_case, experts_case, rotary_case
from gpu_row_cases import accept_case, attention_case, commit_case, gated_norm_case, stream_norm_case
from gpu_scan_cases import conv_case, delta_case, diagonal_case, selective_case, ssd_case
from shapes import (
    ATTENTIONS,
    DELTAS,
    DIAGONALS,
    EXPERTS,
    FEED_FORWARDS,
    LATENTS,
    MIXERS,
    SELECTIVES,
    VOCABULARIES,
    Attention,
    Delta,
    Experts,
    FeedForward,
    Mixer,
    Selective,
)

__all__ = [
    "KINDS",
    "SMALL",
    "Case",
    "Inputs",
    "accept_case",
    "activation_case",
    "attention_case",
    "cases",
    "commit_case",
    "conv_case",
    "copied",
    "delta_case",
    "delta_inputs_case",
    "diagonal_case",
    "experts_case",
    "gated_norm_case",
    "rotary_case",
    "selective_case",
    "ssd_case",
    "stream_norm_case",
]

norm_add_case, norm_case = (partial(stream_norm_case, adds=adds) for adds in (True, False))

KINDS: list[tuple[Callable[..., Case], Mapping[str, Any]]] = [
    (ssd_case, MIXERS),
    (delta_case, DELTAS),
    (attention_case, ATTENTIONS),
    (selective_case, SELECTIVES),
    (conv_case, MIXERS),
    (diagonal_case, DIAGONALS),
    (attention_case, LATENTS),
    (gated_norm_case, MIXERS),
    (norm_add_case, MIXERS),
    (norm_case, MIXERS),
    (rotary_case, ATTENTIONS),
    (activation_case, FEED_FORWARDS),
    (delta_inputs_case, DELTAS),
    (experts_case, EXPERTS),
    (commit_case, ATTENTIONS),
    (accept_case, VOCABULARIES),
]
SMALL: list[tuple[Callable[..., Case], Mapping[str, Any]]] = [
    (ssd_case, {"tiny": Mixer(2, 16, 16, 1)}),
    (delta_case, {"tiny": Delta(1, 2, 16, 16), "tiny-kda": Delta(2, 2, 16, 16, per_channel=True)}),
    (attention_case, {"tiny": Attention(2, 1, 64, context=160)}),
    (selective_case, {"tiny": Selective(32, 16)}),
    (conv_case, {"tiny": Mixer(2, 16, 16, 1)}),
    (diagonal_case, {"tiny": Selective(32)}),
    (attention_case, {"tiny-latent": Attention(2, 1, 24, latent=16, context=160)}),
    (gated_norm_case, {"tiny": Mixer(2, 16, 16, 1)}),
    (norm_add_case, {"tiny": Mixer(2, 16, 16, 1)}),
    (norm_case, {"tiny": Mixer(2, 16, 16, 1)}),
    (rotary_case, {"tiny": Attention(2, 1, 16)}),
    (activation_case, {"tiny": FeedForward(40)}),
    (experts_case, {"tiny": Experts(4, 2, 40, 24)}),
    (delta_inputs_case, {"tiny": Delta(1, 2, 16, 16), "tiny-kda": Delta(2, 2, 16, 16, per_channel=True)}),
    (commit_case, {"tiny": Attention(2, 1, 16)}),
    (accept_case, {"tiny": 50}),
]


def cases(
    kinds: list[tuple[Callable[..., Case], Mapping[str, Any]]],
    sizes: list[tuple[int, int]],
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[Case]:
    """List cases: the first model of every kind at all (batch, nodes), then the others at a few sizes."""
    for place in range(max(len(shapes) for _, shapes in kinds)):
        for batch, n in sizes:
            for make, shapes in kinds:
                if place < len(shapes) and (place == 0 or len(sizes) == 1 or (batch, n) in OTHER_SIZES):
                    model = list(shapes)[place]
                    yield make(model, shapes[model], batch, n, dtype, device)


OTHER_SIZES = {(1, 1), (1, 16), (1, 32), (1, 64), (16, 16), (16, 32)}
