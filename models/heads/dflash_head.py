"""One-shot draft heads: one forward gives a distribution for every position of a block (DFlash, arXiv 2602.06036)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from stree.kernels.dispatch import host_bound
from stree.kernels.ops import kv_commit
from stree.models.heads.dflash_layers import BlockAttention, BlockConfig, BlockLayer, BlockModel, Rotary
from stree.models.layers.base import state_dtype
from stree.models.tree_lm import TreeLM
from stree.models.trimmed import head_of_rows, kept_tokens, rows_of

__all__ = ["BlockCache", "BlockSlots", "Edges", "OneShotHead"]


class BlockCache:
    """Keys and values of a context, and behind them room for those of a block, which the next ones overwrite.

    Args:
        head: whose layers they belong to.
        batch: sequences.
        max_length: most tokens of a context.

    Attributes:
        keys: float[layers, batch, kv_heads, max_length + block_size, headdim].
        values: likewise.
        lengths: int32[batch], tokens of each context.
    """

    pending_tree: None = None  # as a decode state without a verified tree

    def __init__(self, head: OneShotHead, batch: int, max_length: int) -> None:
        sizes, head_dim = head.config.layers, head.attentions[0].head_dim
        shape: Sequence[int] = batch, sizes.num_key_value_heads, max_length + head.block_size, head_dim
        self.max_length = max_length
        self.keys = torch.zeros(sizes.num_hidden_layers, *shape, dtype=head.dtype, device=head.device)
        self.values = torch.zeros_like(self.keys)
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=head.device)

    def put(self, layer: int, keys: Tensor, values: Tensor, count: Tensor) -> None:
        """Write the first int[batch] of float[batch, n, kv_heads, headdim] behind the context, uncounted."""
        path = torch.arange(keys.shape[1], dtype=torch.int32, device=keys.device).expand(len(keys), -1)
        kv_commit(self.keys[layer], self.values[layer], self.lengths, keys, values, path, count.to(torch.int32))

    def select(self, rows: Tensor) -> BlockCache:
        """Copy the contexts of some sequences, int64[batch']."""
        other = copy(self)
        other.keys, other.values, other.lengths = self.keys[:, rows], self.values[:, rows], self.lengths[rows]
        return other

    def reset(self) -> None:
        """Empty every context."""
        self.lengths.zero_()

    def reset_rows(self, rows: Sequence[int]) -> None:
        """Empty some contexts."""
        self.lengths[torch.tensor(rows, device=self.lengths.device)] = 0


@dataclass(frozen=True, slots=True)
class BlockSlots:
    """What one forward gives for the positions of a block.

    Attributes:
        hidden: float[batch, block_size, hidden], after the final norm.
        logits: [batch, block_size, draft vocabulary].
        candidates: int64[batch, block_size, k], the best ones, where the head has a selector.
    """

    hidden: Tensor
    logits: Tensor
    candidates: Tensor | None


@dataclass(frozen=True, slots=True)
class Edges:
    """DFlash2's scores of neighbouring candidates, for the ``num_drafted`` positions that are predicted.

    Attributes:
        candidates: int64[batch, num_drafted, k].
        scores: float[batch, num_drafted, k, k]; entry i, j is the score of candidate j after candidate i of the
            position before, at the first position after the anchor, for every i.
    """

    candidates: Tensor
    scores: Tensor


class OneShotHead:
    """A head that drafts a block of positions at once, from the target's hidden states of the whole context.

    Its input is a block [anchor, MASK, MASK, ...] whose anchor is the pending token.  Every layer attends from the
    block to the context, whose keys and values are projections of the target's hidden states, and to the block itself.
    The distribution of a position depends on the context and the anchor alone, not on what is drafted at other
    positions; with DSpark's bias or DFlash2's selector it depends on the token of the position before, too.

    DSpark's confidence head is not read: growths rate nodes by their probabilities.

    Args:
        model: the weights.
        config: sizes and options.
        target: lends embedding and output head.
        draft_ids: int64[draft vocabulary], the token of each logit, or None where that is its index.

    Attributes:
        hidden_layers: of the target, whose hidden states are read; see ``TreeLM``.
        block_size: positions of a block.
        num_drafted: positions after the anchor that are predicted: the depth of the deepest tree.
        num_features: width of features.
        attentions: of its layers.
    """

    defers_commit = fused_layers = fused_mixers = None  # switches of a TreeLM on which captured steps depend

    def __init__(self, model: BlockModel, config: BlockConfig, target: TreeLM, draft_ids: Tensor | None = None) -> None:
        self.model, self.config, self._draft_ids = model.eval(), config, draft_ids
        self.attentions: list[BlockAttention] = [layer.self_attn for layer in cast(Iterable[BlockLayer], model.layers)]
        self._embedding = target.model.get_input_embeddings()
        self._output = target.model.get_output_embeddings() if config.draft_vocab is None else model.lm_head
        self.hidden_layers, self.block_size = config.hidden_layers, config.block_size
        self._offset = int(not config.predicts_next)
        self.num_drafted = config.block_size - self._offset
        self.num_features: int = config.layers.hidden_size
        self.vocab_size, self.dtype, self.device = target.vocab_size, target.dtype, target.device

    @property
    def context_bytes_per_token(self) -> int:
        """Bytes of the keys and values of a token of the context."""
        width = sum(2 * self.config.layers.num_key_value_heads * attention.head_dim for attention in self.attentions)
        return int(width * torch.finfo(self.dtype).bits // 8)

    def trimmed(self, kept: Sequence[int] | Tensor) -> OneShotHead:
        """Return this head with the output rows of some tokens only.

        Raises:
            ValueError: as for a causal head.
            NotImplementedError: DSpark's bias or DFlash2's selector, which score all tokens.
        """
        if self.config.selector is not None or self.config.markov is not None:
            raise NotImplementedError("a head with DSpark's bias or DFlash2's selector cannot be trimmed")
        rows, draft_ids = rows_of(kept_tokens(kept, self.vocab_size, self.device), self._draft_ids)
        other = copy(self)
        other._output, other._draft_ids = head_of_rows(self._output, rows), draft_ids
        return other

    @torch.no_grad()
    def project(self, hidden: Tensor) -> Tensor:
        """Return float[batch, n, num_features] features of float[batch, n, len(hidden_layers), hidden] states."""
        features: Tensor = self.model.hidden_norm(self.model.fc(hidden.flatten(2)))
        return features

    @torch.no_grad()
    def append(self, cache: BlockCache, features: Tensor, count: Tensor) -> None:
        """Append the first int[batch] of float[batch, n, num_features] features to the contexts."""
        rotary = self._rotary(cache, features)
        for index, attention in enumerate(self.attentions):
            keys, values = attention.keys_and_values(features, rotary)
            cache.put(index, keys, values, count)
        cache.lengths += count.to(torch.int32)

    @torch.no_grad()
    def slots(self, cache: BlockCache, anchor: Tensor) -> BlockSlots:
        """Run the block after each context, whose int64[batch] anchor is the token that follows it."""
        config = self.config
        tokens = anchor[:, None].repeat(1, self.block_size)
        tokens[:, 1:] = config.mask_token_id
        x = F.embedding(tokens, self._embedding.weight) * config.embedding_scale
        rotary = self._rotary(cache, x)
        size = host_bound(cache.lengths, cache.keys.shape[3] - self.block_size) + self.block_size
        masks = {
            kind: self._is_visible(cache, size, *kind) for kind in zip(config.is_causal, config.windows, strict=True)
        }
        for index, layer in enumerate(self.model.layers):
            is_visible = masks[config.is_causal[index], config.windows[index]]
            x = layer(x, partial(self._attend, index, cache, rotary, is_visible))
        hidden = self.model.norm(x)
        logits = self._output(hidden) * config.logit_scale
        if config.softcap:
            logits = torch.tanh(logits / config.softcap) * config.softcap
        logits = logits.to(state_dtype(self.dtype))
        return BlockSlots(hidden, logits, None if config.selector is None else logits.topk(config.selector[1]).indices)

    @torch.no_grad()
    def node_logits(self, slots: BlockSlots, depths: Tensor, tokens: Tensor) -> Tensor:
        """Return the logits of what follows nodes of a tree whose root is the anchor.

        Args:
            slots: of the block.
            depths: int[batch, n]; below ``num_drafted`` nothing is predicted, and the logits are those of the last one.
            tokens: int64[batch, n] of the nodes.

        Returns:
            [batch, n, vocab]; tokens that are no candidates of a selector, or of no draft vocabulary, have -inf.
        """
        place = (depths.long() + self._offset).clamp(max=self.block_size - 1)[..., None]
        logits = slots.logits.gather(1, place.expand(-1, -1, slots.logits.shape[2]))  # no index for every logit
        hidden = slots.hidden.take_along_dim(place, 1)
        if self.config.markov is not None:
            logits += self.model.markov_head(tokens, hidden)
        if slots.candidates is not None:
            candidates = slots.candidates.take_along_dim(place, 1)
            scores = logits.gather(-1, candidates) + self.model.candidate_selector(tokens, hidden, candidates)
            logits = torch.full_like(logits, -torch.inf).scatter_(-1, candidates, scores)
        return self._whole(logits)

    @torch.no_grad()
    def draft(self, context_ids: Tensor, context_features: Tensor, anchor: Tensor) -> Tensor | tuple[Tensor, Edges]:
        """Draft a block after contexts of one length, from an empty cache.

        Args:
            context_ids: int64[batch, n]; only their number is read.
            context_features: float[batch, n, len(hidden_layers) * hidden], the target's hidden states at them, layer
                beside layer.
            anchor: int64[batch], the token after each context.

        Returns:
            [batch, block_size, vocab] logits, of which position k predicts its own token, or the next one if the head's
            ``config.predicts_next``; without DSpark's bias.  With DFlash2's selector also the edge scores.

        Raises:
            ValueError: features of another shape.
        """
        wanted = [*context_ids.shape, len(self.hidden_layers) * self.num_features]
        if [*context_features.shape] != wanted:
            raise ValueError(f"context_features must have shape {wanted}, got {[*context_features.shape]}")
        batch, n = context_ids.shape
        cache = BlockCache(self, batch, n)
        self.append(cache, self.project(context_features[:, :, None]), torch.full_like(cache.lengths, n))
        slots = self.slots(cache, anchor)
        logits = self._whole(slots.logits)
        return logits if slots.candidates is None else (logits, self._edges(slots, anchor))

    def _edges(self, slots: BlockSlots, anchor: Tensor) -> Edges:
        """Score every candidate of a position after every candidate of the position before."""
        assert slots.candidates is not None, "the caller has checked"
        candidates, hidden = slots.candidates[:, self._offset :], slots.hidden[:, self._offset :]
        first = anchor[:, None, None].expand(-1, 1, candidates.shape[2])
        before = torch.cat([first, candidates[:, :-1]], 1)
        scores = [self.model.candidate_selector(tokens, hidden, candidates) for tokens in before.unbind(2)]
        unary = slots.logits[:, self._offset :].gather(-1, candidates)
        return Edges(candidates, unary[:, :, None] + torch.stack(scores, 2))

    def _attend(self, index: int, cache: BlockCache, rotary: Rotary, is_visible: Tensor, x: Tensor) -> Tensor:
        """Run a layer's attention from a block to its context and to itself."""
        attention, size = self.attentions[index], is_visible.shape[-1]
        keys, values = attention.keys_and_values(x, rotary)
        cache.put(index, keys, values, torch.full_like(cache.lengths, self.block_size))
        mixed: Tensor = attention(
            x, rotary, cache.keys[index, :, :, :size], cache.values[index, :, :, :size], is_visible
        )
        return mixed

    def _is_visible(self, cache: BlockCache, size: int, is_causal: bool, window: int | None) -> Tensor:
        """Return which of the first ``size`` rows of a cache a block sees: bool[batch, block_size, size]."""
        key, length = torch.arange(size, device=self.device), cache.lengths.long()[:, None, None]
        query = length + torch.arange(self.block_size, device=self.device)[:, None]
        is_visible = (key < length + self.block_size).expand(-1, self.block_size, -1)
        if is_causal:
            is_visible = is_visible & (key <= query)
        if window is not None and self.config.window_from_anchor:
            is_visible = is_visible & (key >= length - window)
        elif window is not None:
            is_visible = is_visible & ((key - query).abs() < window)
        return is_visible

    def _rotary(self, cache: BlockCache, x: Tensor) -> Rotary:
        """Return the rotary positions of float[batch, n, hidden] behind the contexts."""
        positions = cache.lengths.long()[:, None] + torch.arange(x.shape[1], device=x.device)
        cos, sin = self.model.rotary_emb(x, positions)
        return cos, sin

    def _whole(self, logits: Tensor) -> Tensor:
        """Return logits over the target's vocabulary."""
        if self._draft_ids is None:
            return logits
        whole = logits.new_full((*logits.shape[:-1], self.vocab_size), -torch.inf)
        return whole.index_copy_(-1, self._draft_ids, logits)
