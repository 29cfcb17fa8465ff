"""DFlash heads in training (arXiv 2602.06036): blocks behind many anchors of a window at once."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from stree.distill.heads.network import HeadNetwork, layer_config, published
from stree.models.heads.dflash import speculators_config
from stree.models.heads.dflash_layers import BlockAttention, BlockModel, Rotary
from stree.models.tree_lm import TreeLM

__all__ = ["BlockNetwork", "new_dflash"]

BLOCK_SIZE = 8
NUM_LAYERS = 2
DECAY = 4.0  # position k of a block counts exp(-(k - 1) / DECAY), as in speculators for blocks of 8


class BlockNetwork(HeadNetwork):
    """A DFlash head in training.

    Args:
        target: see ``HeadNetwork``.
        config: likewise.
    """

    def __init__(self, target: TreeLM, config: dict[str, Any]) -> None:
        block = speculators_config(config)
        super().__init__(target, block.hidden_layers, config)
        self.block = block
        self.model = BlockModel(block).to_empty(device="cpu")
        self.model.rotary_emb = type(self.model.rotary_emb)(block.layers)  # its frequencies are no parameters
        for part in self.model.modules():
            if isinstance(part, nn.Linear):
                part.reset_parameters()
            elif "RMSNorm" in type(part).__name__:
                nn.init.ones_(part.weight)  # type: ignore[arg-type]

    def published_name(self, name: str) -> str:
        """Return the name of a parameter in a checkpoint."""
        return name.removeprefix("model.")

    def loss(self, token_ids: Tensor, logits: Tensor, features: Tensor) -> Tensor:
        """Mean divergence of the positions of blocks, which begin at every ``block_size``-th token of a window."""
        size, n = self.block.block_size, token_ids.shape[1]
        first = 1 + int(token_ids.sum()) % min(size, n - size + 1)  # other anchors in every window
        anchors = torch.arange(first, n - size + 2, size, device=token_ids.device)
        hidden = self(token_ids, features, anchors)
        weights = [math.exp(-(place - 1) / DECAY) for place in range(1, size)]
        losses = [self.divergence(hidden[:, :, place], logits[:, anchors + place - 1]) for place in range(1, size)]
        return (torch.stack(losses) * torch.tensor(weights, device=hidden.device)).sum() / sum(weights)

    def forward(self, token_ids: Tensor, features: Tensor, anchors: Tensor) -> Tensor:
        """Run the blocks behind some tokens of texts.

        Args:
            token_ids: int64[batch, n].
            features: float[batch, n, width] of the target.
            anchors: int64[m], places of tokens; a block sees the features before its anchor.

        Returns:
            float[batch, m, block_size, hidden], which the output head reads.
        """
        size, (batch, n) = self.block.block_size, token_ids.shape
        context: Tensor = self.model.hidden_norm(self.model.fc(features))
        tokens = token_ids.new_full((batch, len(anchors), size), self.block.mask_token_id)
        tokens[:, :, 0] = token_ids[:, anchors]
        x = self.embed(tokens.flatten(1))
        positions = (anchors[:, None] + torch.arange(size, device=anchors.device)).flatten()
        places = torch.arange(n, device=anchors.device)
        rotary: list[Rotary] = [self.model.rotary_emb(x, rows[None]) for rows in (positions, places)]
        owner = torch.arange(len(anchors), device=anchors.device).repeat_interleave(size)
        is_visible = torch.cat([places < anchors[owner, None], owner == owner[:, None]], 1).expand(batch, -1, -1)
        for layer in self.model.layers:
            attention: BlockAttention = layer.self_attn  # type: ignore[assignment]
            before = attention.keys_and_values(context, rotary[1])

            def attend(x: Tensor, attention: BlockAttention = attention, before: Any = before) -> Tensor:
                own = attention.keys_and_values(x, rotary[0])
                keys, values = (torch.cat(part, 1).transpose(1, 2) for part in zip(before, own, strict=True))
                mixed: Tensor = attention(x, rotary[0], keys, values, is_visible)
                return mixed

            x = layer(x, attend)
        hidden: Tensor = self.model.norm(x)
        return hidden.view(batch, len(anchors), size, -1)


def new_dflash(target: TreeLM, seed: int) -> BlockNetwork:
    """Make a DFlash head with random weights, which reads three layers of the target and drafts any token."""
    hidden, num_layers = int(target.model.get_input_embeddings().weight.shape[1]), target.num_layers
    layers = layer_config(target, NUM_LAYERS, hidden)
    stop = target.model.config.get_text_config().eos_token_id
    mask = stop[0] if isinstance(stop, list) else stop
    about = published(
        "dflash", "DFlashDraftModel", layers, BLOCK_SIZE - 1, draft_vocab_size=target.vocab_size,
        block_size=BLOCK_SIZE, aux_hidden_state_layer_ids=[min(2, num_layers), num_layers // 2, num_layers - 1],
        mask_token_id=0 if mask is None else mask,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return BlockNetwork(target, about).to(target.device, torch.float32)
