"""Causal draft heads: a few layers that read the token and, for every token, what the target computed before it."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from stree.models.heads.refinements import Fusion
from stree.models.state import DecodeState
from stree.models.tree_lm import TreeLM
from stree.models.trimmed import kept_tokens, rows_of, with_head
from stree.tree import TokenTree

__all__ = ["CausalHead"]


class CausalHead(TreeLM):
    """A draft head that predicts the token after t[p + 1] from t[p + 1] and the target's hidden states at position p.

    It is a language model of a few layers whose input is a fusion of both, with keys and values of its own.  Where the
    target has not run yet, below the root of a growing tree, a node takes the ``feedback`` of its parent in place of
    the target's hidden states.

    Args:
        model: a transformers model of the head's layers, which may share embedding and output head with the target.
        fusion: maps float[batch, n, hidden] embeddings and float[batch, n, width] features to the layers' input.
        hidden_layers: of the target, whose hidden states are the features; see ``TreeLM``.
        feedback_layer: of the head, whose output is fed back: -1 after the final norm, ``num_layers`` before it.
        projection: maps hidden states of several layers, side by side, to features; None where they are features.
        draft_ids: int64[draft vocabulary], the target's token of each of its logits, where it predicts some tokens
            only; None where it predicts all.
        vocab_size: of the target.

    Attributes:
        num_features: width of features and of feedback.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        fusion: Fusion,
        hidden_layers: Sequence[int],
        feedback_layer: int,
        projection: nn.Module | None = None,
        draft_ids: Tensor | None = None,
        vocab_size: int | None = None,
    ) -> None:
        super().__init__(model)
        self._draft_ids, self._size = draft_ids, vocab_size
        self.fusion: Fusion = fusion.eval()
        self.projection = projection
        self.hidden_layers, self.feedback_layer = tuple(hidden_layers), feedback_layer
        self.num_features: int = model.config.hidden_size

    @property
    def vocab_size(self) -> int:
        """Number of logits, those of tokens that it cannot predict included."""
        return super().vocab_size if self._size is None else self._size

    @property
    def num_predicted(self) -> int | None:
        """Number of tokens that it can predict, or None where its own logits are over the target's vocabulary."""
        return None if self._draft_ids is None else len(self._draft_ids)

    def trimmed(self, kept: Sequence[int] | Tensor) -> CausalHead:
        """Return this head with the output rows of some tokens only; see ``stree.models.trimmed``.

        Raises:
            ValueError: no tokens, a repeated one, one outside the vocabulary, or none that the head predicts.
            NotImplementedError: its output layer is not linear.
        """
        tokens = kept_tokens(kept, self.vocab_size, self.device)
        rows, draft_ids = rows_of(tokens, self._draft_ids)
        other = copy(self)
        other._draft_ids, other._size = draft_ids, self.vocab_size
        other.model = with_head(self.model, rows)
        return other

    @torch.no_grad()
    def project(self, hidden: Tensor) -> Tensor:
        """Return float[batch, n, num_features] features of float[batch, n, len(hidden_layers), hidden] states."""
        hidden = hidden.flatten(2)
        return hidden if self.projection is None else self.projection(hidden)

    def forward(
        self, input_ids: Tensor | None, cache: Any, positions: Tensor | None, mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """Call the layers with the fusion of int64[batch, n] tokens and ``features``, float[batch, n, num_features].

        Logits are over the target's vocabulary; those of tokens that the head cannot predict are -inf.
        """
        if "features" not in kwargs:
            raise ValueError("a draft head needs the target's features beside tokens; use run or verify_features")
        inputs = self.fusion(self.model.get_input_embeddings()(input_ids), kwargs.pop("features"))
        logits = super().forward(None, cache, positions, mask, inputs_embeds=inputs, **kwargs)
        if self._draft_ids is None:
            return logits
        whole = logits.new_full((*logits.shape[:-1], self.vocab_size), -torch.inf)
        return whole.index_copy_(-1, self._draft_ids, logits)

    @torch.no_grad()
    def verify_features(
        self, state: DecodeState, tree: TokenTree, first: int, features: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Score nodes ``first``.. of a tree; see ``TreeLM.verify``.

        Args:
            state: of this head.
            tree: n nodes.
            first: number of nodes that were scored by earlier calls.
            features: float[batch, n - first, num_features], of the target where it has run, else the parents' feedback.

        Returns:
            float32[batch, n - first, vocab] logits, and float[batch, n - first, num_features] feedback.
        """
        logits, hidden = self.score(state, tree, first, [self.feedback_layer], features=features)
        assert hidden is not None, "a layer was asked for"
        return logits, self.fusion.feedback(hidden[:, :, 0])

    @torch.no_grad()
    def run(self, token_ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Run a text from an empty cache, by transformers' own forward.

        Args:
            token_ids: int64[batch, n]; token i follows the position whose features are ``features[:, i]``.
            features: float[batch, n, width], the target's hidden states of all ``hidden_layers`` side by side, or
                features and feedback of this head, float[batch, n, num_features].

        Returns:
            float[batch, n, vocab] logits of what comes after each token, and float[batch, n, num_features] feedback.
        """
        if features.shape[-1] != self.num_features or self.projection is None:
            features = self.project(features[:, :, None])
        positions = torch.arange(token_ids.shape[1], device=self.device).expand_as(token_ids)
        cache = self.family.new_cache(self.model.config)
        logits, hidden = self.forward_recording(
            [self.feedback_layer], token_ids, cache, positions, None, features=features
        )
        assert hidden is not None, "a layer was asked for"
        return logits, self.fusion.feedback(hidden[:, :, 0])
