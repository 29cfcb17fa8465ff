"""SpecBlock heads in training (arXiv 2605.07243): three blocks behind every token of a window.

The first block reads the target's hidden states, each further one the output of a random slot of the block before it,
with the true token there.  A slot counts where the head's likeliest tokens at the slots before it in its block were
the target's (valid-prefix mask).  The rank head learns the class of the rank of the target's likeliest token by the
published loss: soft labels and weights that prefer a class too high to one too low, rare classes as heavy as
frequent ones, and only up to its first wrong answer in a block.

Choices: slot k counts ``SLOT_DECAY ** k`` and the rank loss 1, as in the published scripts; later blocks attend as in a
draft, and not to later blocks of earlier tokens, as the published training does; a head drafts any token.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, one_hot
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from stree.distill.heads.network import HeadNetwork, divergence_of_rows, layer_config
from stree.distill.training import mean_over_rows
from stree.models.families import cache_argument
from stree.models.heads.specblock import NUM_RANKED, RankHead, ShiftedLayer, SlotFusion, published_name
from stree.models.tree_lm import TreeLM

__all__ = ["SpecBlockNetwork", "new_specblock", "rank_labels", "rank_loss"]

NUM_BLOCKS, NUM_SLOTS, NUM_LAYERS, NUM_CLASSES = 3, 4, 2, 4
SLOT_DECAY = 0.8
CLASS_ROWS = 10  # rows of a class, of a slot in a step, above which each counts less
LAST_RANKS = (1, 4, 10)  # of the classes but the last


class SpecBlockNetwork(HeadNetwork):
    """A SpecBlock head in training; see ``HeadNetwork``."""

    def __init__(self, target: TreeLM, hidden_layers: list[int], config: LlamaConfig, about: dict[str, Any]) -> None:
        super().__init__(target, hidden_layers, about)
        small: Any = LlamaForCausalLM(LlamaConfig(**{**config.to_dict(), "vocab_size": 1})).model
        for index in range(1, config.num_hidden_layers):
            small.layers[index] = ShiftedLayer(small.config, index, NUM_SLOTS)
        self.norm, small.norm, small.embed_tokens = small.norm, nn.Identity(), nn.Identity()
        self.base, self.fusion = small, SlotFusion(config, NUM_SLOTS)
        self.projection = nn.ModuleDict(
            {"fc": nn.Linear(len(hidden_layers) * config.hidden_size, config.hidden_size, bias=False)}
        )
        self.rank_head = RankHead(config.hidden_size, NUM_CLASSES)

    @property
    def num_drafted(self) -> int:
        """Tokens of a block."""
        return NUM_SLOTS

    def published_name(self, name: str) -> str:
        """Return the name of a parameter in a checkpoint."""
        return published_name("base.norm." + name.removeprefix("norm.") if name.startswith("norm.") else name)

    def loss(self, token_ids: Tensor, logits: Tensor, features: Tensor) -> Tensor:
        """Mean loss of the blocks; see ``HeadNetwork``."""
        blocks = min(NUM_BLOCKS, (token_ids.shape[1] - 1) // NUM_SLOTS)
        count = token_ids.shape[1] - blocks * NUM_SLOTS  # pairs behind which all blocks have the target's logits
        condition, cache, ends = self.projection["fc"](features[:, :count]), DynamicCache(), list[int]()
        offset, total, chooser = 1, condition.new_zeros(()), random.Random(int(token_ids.sum()))
        for _ in range(blocks):
            outputs = self._block(token_ids[:, offset : offset + count], condition, cache, ends)
            total = total + self._loss_of_block(outputs, logits[:, offset:])
            ends.append(chooser.randint(1, NUM_SLOTS))
            condition, offset = outputs[:, :, ends[-1] - 1], offset + ends[-1]
        mean: Tensor = total / blocks
        return mean

    def _block(self, token_ids: Tensor, condition: Tensor, cache: DynamicCache, ends: list[int]) -> Tensor:
        """Run a block behind int64[batch, n] tokens; return float[batch, n, slots, hidden] before the final norm.

        Args:
            token_ids: first tokens.
            condition: float[batch, n, hidden].
            cache: of the blocks before it.
            ends: slots of each of those that it sees.
        """
        count = token_ids.shape[1]
        column = torch.arange(count * NUM_SLOTS, device=token_ids.device)
        token, slot = column // NUM_SLOTS, column % NUM_SLOTS
        is_own, is_earlier = token == token[:, None], token < token[:, None]
        masks = [is_own & (slot < end) for end in ends] + [is_own & (slot <= slot[:, None])]
        masks[0] = masks[0] | is_earlier
        inputs = self.fusion(self.embed(token_ids.repeat_interleave(NUM_SLOTS, 1)), condition)
        found = self.base(
            inputs_embeds=inputs, position_ids=(token + slot)[None], attention_mask=torch.cat(masks, 1)[None, None],
            **{cache_argument(type(self.base)): cache},
        )  # fmt: skip
        outputs: Tensor = found.last_hidden_state.unflatten(1, (count, NUM_SLOTS))
        return outputs

    def _loss_of_block(self, outputs: Tensor, logits: Tensor) -> Tensor:
        """Mean loss of a block, whose slot k at token i predicts as ``logits[:, i + k]`` of the target."""
        hidden, count = self.norm(outputs), outputs.shape[1]
        weight = self.get_output_embeddings().weight
        is_valid = torch.ones(outputs.shape[:2], dtype=torch.bool, device=outputs.device)
        is_ranked, total, ranked, num_ranked = (
            is_valid,
            hidden.new_zeros(()),
            hidden.new_zeros(()),
            hidden.new_zeros(()),
        )
        for slot in range(NUM_SLOTS):
            rows, wanted = hidden[:, :, slot][is_valid | is_ranked], logits[:, slot : slot + count]
            with torch.no_grad():
                found = linear(rows, weight.to(rows.dtype))
            labels = rank_labels(found, wanted[is_valid | is_ranked].argmax(-1))
            if is_valid.any():
                both = hidden[:, :, slot][is_valid][None], wanted[is_valid][None]
                total = total + SLOT_DECAY**slot * mean_over_rows(divergence_of_rows, self, *both)
            of_rank = is_ranked[is_valid | is_ranked]
            classes = self.rank_head(rows[of_rank], found[of_rank])
            loss, rows_counted = rank_loss(classes, labels[of_rank])
            ranked, num_ranked = ranked + loss, num_ranked + rows_counted
            is_first = torch.zeros_like(is_valid).masked_scatter(is_valid | is_ranked, labels == 0)
            is_known = torch.zeros_like(is_valid).masked_scatter(is_ranked, classes.argmax(-1) == labels[of_rank])
            is_valid, is_ranked = is_valid & is_first, is_ranked & is_known
        mean: Tensor = total / sum(SLOT_DECAY**slot for slot in range(NUM_SLOTS)) + ranked / num_ranked.clamp(min=1)
        return mean

    def tensors(self) -> dict[str, Tensor]:
        """Return what is saved: with an output head, and the tokens of its rows."""
        weight = self.get_output_embeddings().weight.detach().to("cpu", torch.bfloat16).contiguous()
        return {**super().tensors(), **_vocab_mapping(len(weight)), "lm_head.weight": weight}

    def config(self) -> dict[str, Any]:
        """Return config.json, in the published layout."""
        return self._config

    def save(self, folder: Path) -> None:
        """Save the head in bfloat16, in the published layout."""
        super().save(folder)
        torch.save(_vocab_mapping(self._config["vocab_size"]), folder / "vocab_mapping.pt")


def _vocab_mapping(size: int) -> dict[str, Tensor]:
    """Say that the head drafts all tokens: offsets of its tokens, and which of the target's it has."""
    return {"d2t": torch.zeros(size, dtype=torch.long), "t2d": torch.ones(size, dtype=torch.bool)}


@torch.no_grad()
def rank_labels(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the class of the rank of int64[n] tokens in [n, vocab] logits: 1; 2 to 4; 5 to 10; beyond."""
    own = logits.gather(-1, tokens[:, None])
    rank = 1 + (logits > own).sum(-1)
    return sum((rank > last).long() for last in LAST_RANKS)  # type: ignore[return-value]


def rank_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the loss of a rank head, float[n, classes] logits and int64[n] labels; and the weights of the rows.

    A label l is spread over classes c by ``1 / (1 + |c - l| + max(l - c, 0))^2``; a row counts ``1 + |l - p| + max(l -
    p, 0)`` where p is the likeliest class, and less where more than ``CLASS_ROWS`` rows have its label.
    """
    classes = torch.arange(logits.shape[-1], device=logits.device)
    below = labels[:, None] - classes
    soft = 1 / (1 + below.abs() + below.clamp(min=0)).float() ** 2
    cross_entropy = -(soft / soft.sum(-1, keepdim=True) * logits.float().log_softmax(-1)).sum(-1)
    missed = labels - logits.argmax(-1)
    counts = one_hot(labels, logits.shape[-1]).sum(0)
    rows = (CLASS_ROWS / counts.clamp(min=1)).clamp(max=1)[labels]
    return (cross_entropy * (1 + missed.abs() + missed.clamp(min=0)) * rows).sum(), rows.sum()


def new_specblock(target: TreeLM, seed: int) -> SpecBlockNetwork:
    """Make a SpecBlock head with random weights, which reads three layers of the target and drafts any token.

    Raises:
        ValueError: a vocabulary of fewer tokens than the rank head reads.
    """
    if target.vocab_size < NUM_RANKED:
        raise ValueError(
            f"a SpecBlock head needs a vocabulary of at least {NUM_RANKED} tokens, got {target.vocab_size}"
        )
    width = int(target.model.get_input_embeddings().weight.shape[1])
    sizes, num_layers = layer_config(target, NUM_LAYERS, 2 * width), target.num_layers
    names = (
        "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads",
        "num_key_value_heads", "max_position_embeddings", "rms_norm_eps",
    )  # fmt: skip
    config = LlamaConfig(**{name: getattr(sizes, name) for name in names}, tie_word_embeddings=False)
    hidden_layers = [min(2, num_layers), num_layers // 2, num_layers - 1]
    about = {
        **config.to_diff_dict(), "architectures": ["LlamaForCausalLMSpecBlockShift"],
        "draft_vocab_size": target.vocab_size, "diffspec_draft_token_num": NUM_SLOTS, "rank_classes": NUM_CLASSES,
        "eagle_aux_hidden_state_layer_ids": hidden_layers, "dtype": "bfloat16",
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return SpecBlockNetwork(target, hidden_layers, config, about).to(target.device, torch.float32)
