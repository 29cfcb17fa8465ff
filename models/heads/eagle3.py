"""EAGLE-3 heads (arXiv 2503.01840): a decoder layer that reads three hidden states of the target beside the token.

``g = fc([h_a; h_b; h_c])``; the first layer attends over ``[norm(embedding); norm(g)]``, twice as wide, and adds its
output to ``g``.  The head's own output takes the place of ``g`` below the root.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, LlamaForCausalLM, Qwen3ForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from stree.models.heads.causal import CausalHead
from stree.models.heads.refinements import Fusion, refinement_of
from stree.models.heads.weights import assign, draft_tokens, read_tensors
from stree.models.hidden_states import FINAL_NORM, check_hidden_layers
from stree.models.tree_lm import TreeLM

__all__ = ["EagleFusion", "EagleProjection", "Qwen3EagleLayer", "check_sizes", "load_eagle3", "read_layers"]

LAYER_NAMES = re.compile(r"^(midlayer|layers\.0)\.")


class EagleFusion(Fusion):
    """The token's embedding and the features side by side, which the first layer takes apart."""

    def forward(self, embeddings: Tensor, features: Tensor) -> Tensor:
        """Concatenate float[batch, n, hidden] embeddings and features."""
        features = self.refinement.features(features, embeddings)
        return torch.cat([embeddings, self.refinement.inputs(features, embeddings)], -1)


class EagleProjection(nn.Module):
    """``fc`` of the target's hidden states, side by side, with a norm of all or of each before it."""

    def __init__(self, count: int, width: int, config: Any, options: Mapping[str, Any], norm: Any) -> None:
        super().__init__()
        self.fc = nn.Linear(count * width, config.hidden_size, bias=False)
        eps = config.rms_norm_eps
        self.input_norm = norm(count * width, eps=eps) if options.get("norm_before_fc") else None
        self.fc_norm = nn.ModuleList(norm(width, eps=eps) for _ in range(count)) if options.get("fc_norm") else None

    def forward(self, hidden: Tensor) -> Tensor:
        """Project float[batch, n, count x width] hidden states to float[batch, n, hidden]."""
        if self.input_norm is not None:
            hidden = self.input_norm(hidden)
        if self.fc_norm is not None:
            parts = zip(self.fc_norm, hidden.chunk(len(self.fc_norm), -1), strict=True)
            hidden = torch.cat([norm(part) for norm, part in parts], -1)
        projected: Tensor = self.fc(hidden)
        return projected


class EagleLayer(nn.Module):
    """The first layer, a decoder layer of transformers with projections of twice the width."""

    input_layernorm: Any
    self_attn: Any
    post_attention_layernorm: Any
    mlp: Any

    def __init__(self, config: Any, *, norm_before_residual: bool) -> None:
        super().__init__(config, 0)
        self.hidden_norm = type(self.input_layernorm)(config.hidden_size, eps=config.rms_norm_eps)
        attention = self.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            part = getattr(attention, name)
            wide = nn.Linear(2 * config.hidden_size, part.out_features, bias=part.bias is not None)
            setattr(attention, name, wide)
        self._norm_before_residual = norm_before_residual

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """Run the layer on float[batch, n, 2 x hidden], the embeddings first."""
        embeddings, residual = hidden_states.chunk(2, -1)
        normed = self.hidden_norm(residual)
        attended = self.self_attn(torch.cat([self.input_layernorm(embeddings), normed], -1), **kwargs)[0]
        residual = (normed if self._norm_before_residual else residual) + attended
        out: Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return out


class LlamaEagleLayer(EagleLayer, LlamaDecoderLayer):  # type: ignore[misc]
    """Of Llama's."""


class Qwen3EagleLayer(EagleLayer, Qwen3DecoderLayer):  # type: ignore[misc]
    """Of Qwen3's."""


# By the model_type of a head's layers.
MODELS: dict[str, tuple[Any, type[EagleLayer]]] = {
    "llama": (LlamaForCausalLM, LlamaEagleLayer), "qwen3": (Qwen3ForCausalLM, Qwen3EagleLayer),
}  # fmt: skip


def load_eagle3(target: TreeLM, source: str | Path, published: Mapping[str, Any]) -> CausalHead:
    """Load a head in the layout of speculators, or of EAGLE, SpecForge, AngelSlim and DeepSpec.

    Args:
        target: the head is placed on its device, in its dtype, and may share its embedding.
        source: folder or hub id.
        published: its config.json.

    Raises:
        NotImplementedError: a layer of another family, or a refinement that is not known.
        ValueError: the checkpoint cannot be read, or was made for a target of other sizes.
    """
    config, layers = _layer_config(published, source), read_layers(published, target.num_layers)
    check_hidden_layers(layers, target.num_layers)
    tensors = read_tensors(source, lambda name: True, str(target.device))
    offsets = tensors.pop("d2t", None)
    what = f"draft head {str(source)!r}"
    draft_ids = None if offsets is None else draft_tokens(offsets, len(offsets), target.vocab_size, what)
    tensors = {LAYER_NAMES.sub("layers.0.", name): value for name, value in tensors.items()}
    tensors = {name: value for name, value in tensors.items() if name not in ("t2d", "verifier_norm.weight")}
    width = int(target.model.get_input_embeddings().weight.shape[1])
    check_sizes(source, target, config, published, width)
    model, projection = _modules(target, config, published, len(layers), tensors, draft_ids)
    with torch.device("meta"):
        fusion = EagleFusion(refinement_of(published, source)(config))
    parts = nn.ModuleDict({
        "base": model.base_model, "head": model.lm_head, "projection": projection, "fusion": fusion
    })  # fmt: skip
    assign(parts, {_placed(name): value.to(target.dtype) for name, value in tensors.items()}, what)
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config).to(target.device)
    feedback = FINAL_NORM if published.get("norm_output") else config.num_hidden_layers
    return CausalHead(
        model, fusion, layers, feedback, projection.eval(), draft_ids, target.vocab_size
    )  # fmt: skip


def _layer_config(published: Mapping[str, Any], source: Any) -> Any:
    """Return the transformers config of the layers, which SpecForge writes at the top."""
    layer = dict(published.get("transformer_layer_config") or published)
    kind = layer.pop("model_type", "llama")
    if kind not in MODELS:
        raise NotImplementedError(f"draft head {str(source)!r} has {kind!r} layers; known are {', '.join(MODELS)}")
    config = CONFIG_MAPPING[kind](**layer)
    config.tie_word_embeddings = False
    return config


def read_layers(published: Mapping[str, Any], num_layers: int) -> list[int]:
    """Return the target's layers that are read: i is the residual stream after i layers.

    speculators and vLLM count so; EAGLE's ``eagle_config`` and DeepSpec name the layer itself, one less.
    """
    ids = published.get("eagle_aux_hidden_state_layer_ids") or published.get("aux_hidden_state_layer_ids")
    if ids is not None:
        return list(ids)
    named = published.get("eagle_config") or {}
    ids = named.get("eagle_aux_hidden_state_layer_ids") or published.get("target_layer_ids")
    return [2, num_layers // 2, num_layers - 3] if ids is None else [layer + 1 for layer in ids]


def check_sizes(source: Any, target: TreeLM, config: Any, published: Mapping[str, Any], width: int) -> None:
    """Refuse a head that was made for a target of other sizes."""
    pairs = {
        "target_hidden_size": (published.get("target_hidden_size") or width, width),
        "hidden_size": (config.hidden_size, width),
        "vocab_size": (config.vocab_size, target.vocab_size),
    }
    for name, (given, wanted) in pairs.items():
        if given != wanted:
            raise ValueError(f"draft head {str(source)!r} must have {name} {wanted}, the target's, got {given}")


def _modules(
    target: TreeLM, config: Any, published: Mapping[str, Any], count: int, tensors: Mapping[str, Tensor],
    draft_ids: Tensor | None,
) -> tuple[Any, EagleProjection]:  # fmt: skip
    """Make the head's modules without weights but for what it shares with the target."""
    options = {**published, **published.get("eagle_config", {})}
    shares_head = draft_ids is None and "lm_head.weight" not in tensors
    with torch.device("meta"):
        model_class, layer_class = MODELS[config.model_type]
        model = model_class(copy.copy(config))
        base, norm = model.model, type(model.model.norm)
        is_normed = bool(options.get("norm_before_residual"))
        base.layers[0] = layer_class(model.config, norm_before_residual=is_normed)
        if draft_ids is not None:
            model.lm_head = nn.Linear(config.hidden_size, len(draft_ids), bias=False)
        projection = EagleProjection(count, config.hidden_size, config, options, norm)
    model.requires_grad_(False)  # before it shares modules with the target
    if "embed_tokens.weight" not in tensors:
        model.set_input_embeddings(target.model.get_input_embeddings())
    if shares_head:
        model.lm_head = target.model.get_output_embeddings()
    model.generation_config = target.model.generation_config
    return model.eval(), projection


def _placed(name: str) -> str:
    """Name of a tensor among the parts of a head."""
    if name == "lm_head.weight":
        return "head.weight"
    if name.startswith("refinement."):
        return f"fusion.{name}"
    return f"projection.{name}" if name.startswith(("fc.", "fc_norm.", "input_norm.")) else f"base.{name}"
