"""Multi-token prediction (MTP) layers that a target's checkpoint holds beside its own weights.

transformers drops them when it loads the checkpoint, so they are read from the safetensors files.  A head is a model of
the target's own class with these layers alone; embedding and output head are the target's.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from stree.models.heads.causal import CausalHead
from stree.models.heads.refinements import Fusion, Refinement
from stree.models.heads.weights import assign, fused_experts, read_tensors, tensor_files
from stree.models.hidden_states import FINAL_NORM, check_hidden_size
from stree.models.tree_lm import TreeLM

__all__ = ["MtpFusion", "load_mtp", "load_speculators_mtp", "mtp_files"]


class MtpFusion(Fusion):
    """``fc([norm(embedding); norm(hidden)])``, the embedding first; without weights until some are assigned.

    Args:
        hidden_size: of the target.
        norm: makes a norm of the target's class.
        refinement: see ``Fusion``.
    """

    def __init__(self, hidden_size: int, norm: Any, refinement: Refinement | None = None) -> None:
        super().__init__(refinement)
        self.norm_embedding, self.norm_hidden = norm(), norm()
        self.fc = nn.Linear(2 * hidden_size, hidden_size, bias=False, device="meta")

    def forward(self, embeddings: Tensor, features: Tensor) -> Tensor:
        """Fuse float[batch, n, hidden] embeddings and features."""
        features = self.norm_hidden(self.refinement.features(features, embeddings))
        mixed: Tensor = self.fc(torch.cat([self.norm_embedding(embeddings), features], -1))
        return self.refinement.inputs(mixed, embeddings)


@dataclass(frozen=True, slots=True)
class Layout:
    """How a family's checkpoints hold their MTP layers.

    Attributes:
        prefix: of the names of all tensors, with the target's number of layers.
        renamed: pairs of a pattern of the rest of a name and its replacement: ``fusion.*`` for ``MtpFusion``, else a
            tensor of the model of these layers.
        changes: of the target's config, for a number of layers.
        field: of the target's config, which lists the kinds of these layers; None where all are of one kind.
    """

    prefix: str
    renamed: tuple[tuple[str, str], ...]
    changes: Callable[[Any, int], dict[str, Any]]
    field: str | None = None


def _attention_layers(_: Any, num_layers: int) -> dict[str, Any]:
    return {"num_hidden_layers": num_layers, "layer_types": ["full_attention"] * num_layers}


SPECULATORS = Layout(
    "mtp_layers.0.",
    (
        (r"token_layernorm\.", "fusion.norm_embedding."),
        (r"hidden_layernorm\.", "fusion.norm_hidden."),
        (r"input_proj\.", "fusion.fc."),
        (r"refinement\.", "fusion.refinement."),
        (r"final_layernorm\.", "norm."),
        ("", "layers.0."),
    ),
    _attention_layers,
)
EH_NAMES = (
    (r"(layers\.0\.)?enorm\.", "fusion.norm_embedding."),
    (r"(layers\.0\.)?hnorm\.", "fusion.norm_hidden."),
    (r"(layers\.0\.)?eh_proj\.", "fusion.fc."),
)
QWEN = Layout(
    "mtp.",
    (
        (r"pre_fc_norm_embedding\.", "fusion.norm_embedding."),
        (r"pre_fc_norm_hidden\.", "fusion.norm_hidden."),
        (r"fc\.", "fusion.fc."),
    ),
    _attention_layers,
)
LAYOUTS = {
    "qwen3_next": QWEN,
    "qwen3_5_text": QWEN,
    "qwen3_5_moe_text": QWEN,
    "nemotron_h": Layout(
        "mtp.",
        (*EH_NAMES, (r"layers\.\d+\.final_layernorm\.", "norm_f.")),
        lambda config, _: {"layers_block_type": list(config.mtp_layers_block_type)},
        "mtp_layers_block_type",
    ),
    "bailing_hybrid": Layout(
        "layers.{num_hidden_layers}.",
        (
            *EH_NAMES,
            (r"final_layernorm\.", "norm."),
            (r"(?:attention|self_attn)\.dense\.", "layers.0.self_attn.o_proj."),
            (r"(?:attention|self_attn)\.", "layers.0.self_attn."),
            (r"mlp\.gate\.expert_bias", "layers.0.mlp.gate.e_score_correction_bias"),
            (r"(input_layernorm|post_attention_layernorm|mlp)\.", r"layers.0.\1."),
        ),
        lambda config, layers: {**_attention_layers(config, layers), "mlp_layer_types": ["sparse"] * layers},
    ),
}


def mtp_files(config: Any, source: str | Path) -> dict[str, str]:
    """Map the MTP tensors of a target's checkpoint to their files; empty where it has none or they are not known."""
    if config.model_type not in LAYOUTS:
        return {}
    prefix = _layout(config)[1]
    try:
        files = tensor_files(source)
    except (OSError, ValueError):  # a checkpoint without safetensors
        return {}
    return {name: file for name, file in files.items() if name.removeprefix("model.").startswith(prefix)}


def load_mtp(target: TreeLM, source: str | Path | None = None) -> CausalHead:
    """Load the MTP layers of a target's checkpoint; their shapes alone where the target is on the meta device.

    Args:
        target: the head shares its embedding and output head.
        source: folder or hub id of the checkpoint; None for the one that the target was loaded from.

    Raises:
        NotImplementedError: a family whose MTP layers are not known.
        ValueError: the checkpoint has none, or tensors of other names or shapes than the target's config implies.
    """
    config = target.model.config
    source = config._name_or_path if source is None else source
    layout, prefix = _layout(config)
    tensors = read_tensors(source, lambda name: name.removeprefix("model.").startswith(prefix), str(target.device))
    if not tensors:
        raise ValueError(
            f"checkpoint {str(source)!r} holds no MTP layers: it has no tensors {prefix}*, which re-quantised copies "
            "often leave out"
        )
    rest = {name.removeprefix("model.").removeprefix(prefix): value for name, value in tensors.items()}
    return _head(target, target.model_class, config, layout, rest, source)


def load_speculators_mtp(
    target: TreeLM, source: str | Path, layer_config: Any, refinement: type[Refinement] = Refinement
) -> CausalHead:
    """Load an MTP head in the layout of the package speculators; see ``load_mtp``.

    Args:
        target: likewise.
        source: folder or hub id.
        layer_config: a config of transformers, ``transformer_layer_config`` in its config.json.
        refinement: what a recipe of training added to it.
    """
    prefix = SPECULATORS.prefix
    check_hidden_size(layer_config.hidden_size, target.model, f"draft head {str(source)!r}")
    tensors = read_tensors(source, lambda name: name.startswith(prefix), str(target.device))
    rest = {name.removeprefix(prefix): value for name, value in tensors.items()}
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(layer_config)]
    return _head(target, kind, layer_config, SPECULATORS, rest, source, refinement)


def _head(
    target: TreeLM, kind: Any, config: Any, layout: Layout, tensors: Mapping[str, Tensor], source: Any,
    refinement: type[Refinement] = Refinement,
) -> CausalHead:  # fmt: skip
    """Make a head of a model class's layers with tensors of a layout, named without its prefix."""
    named = {_renamed(name, layout): value.to(target.dtype) for name, value in tensors.items()}
    named = fused_experts(named)
    layers = {match[1] for name in named if (match := re.match(r"layers\.(\d+)\.", name))}
    config = copy.deepcopy(config)
    for name, value in layout.changes(config, len(layers)).items():
        setattr(config, name, value)
    by = "" if layout.field is None else f" with {layout.field} {getattr(config, layout.field)}"
    model = _model_of(target, kind, config, by)
    norm = next(child for name, child in model.base_model.named_children() if name in ("norm", "norm_f"))
    with torch.device("meta"):
        refined = refinement(config)
    fusion = MtpFusion(config.hidden_size, lambda: copy.deepcopy(norm), refined)
    parts = nn.ModuleDict({"fusion": fusion, "base": model.base_model})
    placed = {name if name.startswith("fusion.") else f"base.{name}": value for name, value in named.items()}
    shared = model.get_input_embeddings().weight
    if shared.is_meta:  # else `assign` sees that it has values
        placed |= {name: weight for name, weight in parts.named_parameters() if weight is shared}
    assign(parts, placed, f"checkpoint {str(source)!r} of MTP layers{by}")
    base = model.base_model
    if hasattr(base, "rotary_emb"):  # its buffers are not in the checkpoint
        base.rotary_emb = type(base.rotary_emb)(config=config).to(target.device)
    return CausalHead(model, fusion, [FINAL_NORM], FINAL_NORM)


def _layout(config: Any) -> tuple[Layout, str]:
    """Return how a target's family holds MTP layers, and the prefix of their tensors.

    Raises:
        NotImplementedError: it is not known.
    """
    if config.model_type not in LAYOUTS:
        raise NotImplementedError(f"MTP layers are known for {', '.join(LAYOUTS)}, not for {config.model_type!r}")
    layout = LAYOUTS[config.model_type]
    return layout, layout.prefix.format(num_hidden_layers=config.num_hidden_layers)


def _renamed(name: str, layout: Layout) -> str:
    """Name of a tensor among the fusion's and the model's."""
    for pattern, replacement in layout.renamed:
        if re.match(pattern, name):
            return re.sub(f"^{pattern}", replacement, name)
    return name


def _model_of(target: TreeLM, kind: Any, config: Any, by: str) -> Any:
    """Make a causal language model without weights but for the target's embedding and output head.

    ``by`` names the entry of the config that decides its layers in errors.
    """
    try:
        with torch.device("meta"):
            model = kind(config).requires_grad_(False)
    except Exception as error:  # a damaged config raises whatever it meets in transformers
        reason = f"{type(error).__name__}: {error}"
        what = f"this config of {config.model_type}{by}"
        raise ValueError(f"transformers makes no MTP layers of {what}: {reason}") from error
    model.set_input_embeddings(target.model.get_input_embeddings())
    model.set_output_embeddings(target.model.get_output_embeddings())
    model.generation_config = target.model.generation_config
    return model.eval()
