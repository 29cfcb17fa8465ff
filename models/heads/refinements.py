"""What recipes of training add to a causal head: the token refines the features, and the feedback may be projected.

The config key ``stree_refinement`` of a saved head names one; other programs do not know it, nor its tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["KEY", "REFINEMENTS", "FeatureSampling", "Fusion", "Refinement", "TokenGuidedFusion", "refinement_of"]

KEY = "stree_refinement"
EXPANSION = 4  # of feature sampling: its width over that of the features


class Refinement(nn.Module):
    """No refinement, as in published heads.

    Args:
        config: of the head's layers.

    Attributes:
        name: in config.json.
    """

    name = "plain"

    def __init__(self, config: Any) -> None:
        super().__init__()

    def features(self, features: Tensor, embeddings: Tensor) -> Tensor:
        """Refine float[batch, n, hidden] features before they are fused with the embeddings."""
        return features

    def inputs(self, inputs: Tensor, embeddings: Tensor) -> Tensor:
        """Refine the fusion, float[batch, n, hidden]."""
        return inputs

    def feedback(self, hidden: Tensor) -> Tensor:
        """Return what takes the place of the target's features below the root."""
        return hidden


class TokenGuidedFusion(Refinement):
    """``x + down(silu(up([norm(x); norm(e)])))``: a look back at the token (GRIFFIN, arXiv 2502.11018).

    The published model norms x twice and has one norm for x and e; here each has one of its own.
    """

    name = "griffin"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        hidden, width = config.hidden_size, config.intermediate_size
        self.norm_inputs, self.norm_embedding = _norm(config), _norm(config)
        self.up = nn.Linear(2 * hidden, width, bias=False)
        self.down = _zero(nn.Linear(width, hidden, bias=False))

    def inputs(self, inputs: Tensor, embeddings: Tensor) -> Tensor:
        """Refine the fusion, float[batch, n, hidden]."""
        both = torch.cat([self.norm_inputs(inputs), self.norm_embedding(embeddings)], -1)
        refined: Tensor = inputs + self.down(nn.functional.silu(self.up(both)))
        return refined


class FeatureSampling(Refinement):
    """``f + down(up(norm(f)) * silu(gate(norm(e))))``: the token picks features in a wider space (FSPAD, 2408.15562).

    The feedback is a projection of the head's output, so that what is aligned with the target's features is not what
    the output head reads.  The paper's text gives no sizes: the width is four times that of the features.
    """

    name = "fspad"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        hidden, width = config.hidden_size, EXPANSION * config.hidden_size
        self.norm_features, self.norm_embedding = _norm(config), _norm(config)
        self.up, self.gate = nn.Linear(hidden, width, bias=False), nn.Linear(hidden, width, bias=False)
        self.down = _zero(nn.Linear(width, hidden, bias=False))
        self.align = nn.Linear(hidden, hidden, bias=False)
        nn.init.eye_(self.align.weight)

    def features(self, features: Tensor, embeddings: Tensor) -> Tensor:
        """Refine float[batch, n, hidden] features before they are fused with the embeddings."""
        wide = self.up(self.norm_features(features)) * nn.functional.silu(self.gate(self.norm_embedding(embeddings)))
        refined: Tensor = features + self.down(wide)
        return refined

    def feedback(self, hidden: Tensor) -> Tensor:
        """Return what takes the place of the target's features below the root."""
        projected: Tensor = self.align(hidden)
        return projected


class Fusion(nn.Module):
    """The input of a causal head's layers, from the token's embedding and the features.

    Args:
        refinement: of features, fusion and feedback; None for none.
    """

    def __init__(self, refinement: Refinement | None = None) -> None:
        super().__init__()
        self.refinement = refinement or Refinement(None)

    def feedback(self, hidden: Tensor) -> Tensor:
        """Return the feedback of float[batch, n, hidden] outputs of the layers."""
        return self.refinement.feedback(hidden)


REFINEMENTS: dict[str, type[Refinement]] = {
    kind.name: kind for kind in (Refinement, TokenGuidedFusion, FeatureSampling)
}


def refinement_of(published: Mapping[str, Any], source: Any) -> type[Refinement]:
    """Return the refinement that a head's config.json names.

    Raises:
        NotImplementedError: it is not known.
    """
    name = published.get(KEY, Refinement.name)
    if name not in REFINEMENTS:
        known = ", ".join(REFINEMENTS)
        raise NotImplementedError(f"{KEY} of draft head {str(source)!r} must be one of {known}, got {name!r}")
    return REFINEMENTS[name]


def _norm(config: Any) -> nn.RMSNorm:
    return nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


def _zero(linear: nn.Linear) -> nn.Linear:
    """Set a weight to zero: training begins as if there were no refinement."""
    nn.init.zeros_(linear.weight)
    return linear
