"""Causal draft heads in training: MTP and EAGLE-3, one decoder layer of Qwen3 each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from stree.distill.heads.network import HeadNetwork, layer_config, published
from stree.distill.heads.recipe import PLAIN, Recipe
from stree.distill.training import mean_over_rows
from stree.models.families import cache_argument
from stree.models.heads.eagle3 import EagleFusion, EagleProjection, Qwen3EagleLayer
from stree.models.heads.mtp import MtpFusion
from stree.models.heads.refinements import KEY, Fusion
from stree.models.hidden_states import FINAL_NORM
from stree.models.tree_lm import TreeLM

__all__ = ["CausalNetwork", "new_eagle3", "new_mtp"]

NUM_STEPS = 3  # of a head that are trained
STEP_DECAY = 0.6  # weight of a head step relative to the one before it (FastMTP, arXiv 2509.18362)


class CausalNetwork(HeadNetwork):
    """A causal head in training.

    The first step reads the target's hidden states, the next ones the feedback of the step before, each with the true
    tokens; step k counts ``STEP_DECAY ** k``.  Every step attends as in a draft: to the keys of the first step up to
    its root, and to its own ancestors below it (training-time test, EAGLE-3, arXiv 2503.01840).

    Args:
        target: see ``HeadNetwork``.
        hidden_layers: likewise.
        config: likewise.
        parts: ``fusion`` and ``projection``, see ``CausalHead``; ``layers``, a base model of transformers whose
            embedding and final norm are not used; ``norm``, the final norm.
        prefixes: pairs of the beginning of a parameter's name and what it is in a checkpoint.
        feeds_norm: whether the feedback is what the output head reads, and not the residual stream before the norm.
        recipe: of the loss.
    """

    def __init__(
        self, target: TreeLM, hidden_layers: Sequence[int], config: dict[str, Any], parts: Mapping[str, nn.Module],
        prefixes: Mapping[str, str], *, feeds_norm: bool, recipe: Recipe,
    ) -> None:  # fmt: skip
        name = recipe.refinement.name
        super().__init__(target, hidden_layers, config if name == "plain" else {**config, KEY: name})
        self.fusion: Fusion = parts["fusion"]  # type: ignore[assignment]
        self.projection, self.recipe = parts["projection"], recipe
        self.layers, self.norm = parts["layers"], parts["norm"]
        self._prefixes, self._feeds_norm = prefixes, feeds_norm

    def published_name(self, name: str) -> str:
        """Return the name of a parameter in a checkpoint."""
        prefix = next(prefix for prefix in self._prefixes if name.startswith(prefix))
        return self._prefixes[prefix] + name.removeprefix(prefix)

    def loss(self, token_ids: Tensor, logits: Tensor, features: Tensor) -> Tensor:
        """Mean loss of ``NUM_STEPS`` steps of the head."""
        given: Tensor = self.projection(features)
        hidden = given
        count, features, cache, counted = token_ids.shape[1] - 1, given, DynamicCache(), None
        total, weight = given.new_zeros(()), self.get_output_embeddings().weight
        index = torch.arange(count, device=token_ids.device)
        masks = [index <= index[:, None]]  # of the keys of each step
        for step in range(NUM_STEPS):
            if step:
                masks.append(index == index[:, None])
                counted = self.recipe.next_counted(hidden[:, :-1], weight, token_ids[:, 1 + step :], counted)
            count -= bool(step)
            inputs = self.fusion(self.embed(token_ids[:, 1 + step :]), features[:, :count])
            residual = self.layers(
                inputs_embeds=inputs, position_ids=step + index[None, :count], attention_mask=_of_first(masks, count),
                **{cache_argument(type(self.layers)): cache},
            ).last_hidden_state  # fmt: skip
            hidden = self.norm(residual)
            features = self.fusion.feedback(hidden if self._feeds_norm else residual)
            loss = self._mean(hidden, logits[:, 1 + step :], counted)
            loss = loss + self.recipe.loss_of_feedback(features, given[:, 1 + step :])
            total = total + STEP_DECAY**step * loss
        return total / sum(STEP_DECAY**step for step in range(NUM_STEPS))

    def _mean(self, hidden: Tensor, logits: Tensor, counted: Tensor | None) -> Tensor:
        """Mean loss of the rows of a step that count; 0 where none does."""
        if counted is not None:
            hidden, logits = hidden[counted][None], logits[counted][None]
        return mean_over_rows(self.recipe.loss_of_rows, self, hidden, logits) if hidden.numel() else hidden.sum()


def _of_first(masks: Sequence[Tensor], count: int) -> Tensor:
    """Join masks bool[n, n] of the keys of each step, which has one key less than the one before."""
    parts = [mask[:count, : len(mask) - step] for step, mask in enumerate(masks)]
    return torch.cat(parts, 1)[None, None]


def new_mtp(target: TreeLM, seed: int, recipe: Recipe = PLAIN) -> CausalNetwork:
    """Make an MTP head with random weights."""
    hidden = int(target.model.get_input_embeddings().weight.shape[1])
    config = layer_config(target, 1, 3 * hidden)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        fusion = MtpFusion(hidden, lambda: nn.RMSNorm(hidden, eps=config.rms_norm_eps))
        fusion.fc.to_empty(device="cpu").reset_parameters()
        parts = _layers(config) | {"fusion": fusion, "projection": nn.Identity()}
        fusion.refinement = recipe.refinement(config)
    prefixes = {
        "fusion.refinement.": "mtp_layers.0.refinement.",
        "fusion.norm_embedding.": "mtp_layers.0.token_layernorm.",
        "fusion.norm_hidden.": "mtp_layers.0.hidden_layernorm.", "fusion.fc.": "mtp_layers.0.input_proj.",
        "layers.layers.0.": "mtp_layers.0.", "norm.": "mtp_layers.0.final_layernorm.",
    }  # fmt: skip
    about = published("mtp", "MTPDraftModel", config, NUM_STEPS, num_nextn_predict_layers=1)
    head = CausalNetwork(target, [FINAL_NORM], about, parts, prefixes, feeds_norm=True, recipe=recipe)
    return head.to(target.device, torch.float32)


def new_eagle3(target: TreeLM, seed: int, recipe: Recipe = PLAIN) -> CausalNetwork:
    """Make an EAGLE-3 head with random weights, which reads a low, a middle and a high layer and drafts any token."""
    hidden, num_layers = int(target.model.get_input_embeddings().weight.shape[1]), target.num_layers
    config = layer_config(target, 1, 2 * hidden)
    hidden_layers = [min(2, num_layers), num_layers // 2, num_layers - 1]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        parts = _layers(config)
        layers: Any = parts["layers"]
        layers.layers[0] = Qwen3EagleLayer(layers.config, norm_before_residual=False)
        parts["projection"] = EagleProjection(len(hidden_layers), hidden, config, {}, nn.RMSNorm)
        parts["fusion"] = EagleFusion(recipe.refinement(config))
    prefixes = {"layers.": "", "norm.": "norm.", "projection.": "", "fusion.refinement.": "refinement."}
    about = published(
        "eagle3", "Eagle3DraftModel", config, NUM_STEPS, draft_vocab_size=target.vocab_size,
        eagle_aux_hidden_state_layer_ids=hidden_layers,
    )  # fmt: skip
    head = CausalNetwork(target, hidden_layers, about, parts, prefixes, feeds_norm=False, recipe=recipe)
    return head.to(target.device, torch.float32)


def _layers(config: Qwen3Config) -> dict[str, nn.Module]:
    """Make the layers of a head with random weights, and its final norm."""
    small = Qwen3Config(**{**config.to_dict(), "vocab_size": 1})
    layers = Qwen3ForCausalLM(small).model
    norm, layers.norm, layers.embed_tokens = layers.norm, nn.Identity(), nn.Identity()
    return {"layers": layers, "norm": norm}
