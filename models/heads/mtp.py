"""Multi-token prediction (MTP) layers that a target's checkpoint holds beside its own weights.

transformers drops them when it loads the checkpoint, so they are read from the safetensors files.  A head is a model of
the target's own class with these layers alone; embedding and output head are the target's.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stree.models.heads.causal import CausalHead
from stree.models.heads.weights import fused_experts, read_tensors
from stree.models.hidden_states import FINAL_NORM
from stree.models.tree_lm import TreeLM

__all__ = ["MtpFusion", "load_mtp"]


class MtpFusion(nn.Module):
    """``fc([norm(embedding); norm(hidden)])``, the embedding first.

    Args:
        hidden_size: of the target.
        norm: makes a norm of the target's class.
    """

    def __init__(self, hidden_size: int, norm: Any) -> None:
        super().__init__()
        self.norm_embedding, self.norm_hidden = norm(), norm()
        self.fc = nn.Linear(2 * hidden_size, hidden_size, bias=False)

    def forward(self, embeddings: Tensor, features: Tensor) -> Tensor:
        """Fuse float[batch, n, hidden] embeddings and features."""
        mixed: Tensor = self.fc(torch.cat([self.norm_embedding(embeddings), self.norm_hidden(features)], -1))
        return mixed


@dataclass(frozen=True, slots=True)
class Layout:
    """How a family's checkpoints name the tensors of their MTP layers.

    Attributes:
        prefix: of all of them.
        fusion: by name behind the prefix, the tensor of ``MtpFusion``.
        norm: name of the final norm behind the prefix.
        layers: prefix of the layers behind the prefix.
    """

    prefix: str
    fusion: Mapping[str, str]
    norm: str
    layers: str = "layers."


QWEN = Layout(
    "mtp.",
    {
        "fc.weight": "fc.weight",
        "pre_fc_norm_embedding.weight": "norm_embedding.weight",
        "pre_fc_norm_hidden.weight": "norm_hidden.weight",
    },
    "norm.weight",
)
LAYOUTS = {"qwen3_next": QWEN, "qwen3_5_text": QWEN, "qwen3_5_moe_text": QWEN}


def load_mtp(target: TreeLM, source: str | Path | None = None) -> CausalHead:
    """Load the MTP layers of a target's checkpoint.

    Args:
        target: the head shares its embedding and output head.
        source: folder or hub id of the checkpoint; None for the one that the target was loaded from.

    Raises:
        NotImplementedError: a family whose MTP layers are not known.
        ValueError: the checkpoint has none, or tensors of other names or shapes than the target's config implies.
    """
    config = target.model.config
    layout = LAYOUTS.get(config.model_type)
    if layout is None:
        raise NotImplementedError(f"MTP layers are known for {', '.join(LAYOUTS)}, not for {config.model_type!r}")
    source = config._name_or_path if source is None else source
    prefixes = (layout.prefix, f"model.{layout.prefix}")
    tensors = read_tensors(source, lambda name: name.startswith(prefixes), str(target.device))
    if not tensors:
        raise ValueError(f"checkpoint {str(source)!r} has no tensors {layout.prefix}*: it was saved without MTP layers")
    tensors = {name.removeprefix("model.").removeprefix(layout.prefix): value for name, value in tensors.items()}
    num_layers = 1 + max(
        int(name.removeprefix(layout.layers).partition(".")[0]) for name in tensors if name.startswith(layout.layers)
    )
    model = _layers_of(target, num_layers)
    base = model.base_model
    fusion = MtpFusion(config.hidden_size, lambda: copy.deepcopy(base.norm))
    mine = {layout.fusion[name]: tensors.pop(name) for name in layout.fusion if name in tensors}
    mine = {name: value.to(target.dtype) for name, value in mine.items()}
    renamed = {"norm.weight" if name == layout.norm else name: value for name, value in tensors.items()}
    theirs = {name: value.to(target.dtype) for name, value in fused_experts(renamed).items()}
    _assign(fusion, mine, source)
    _assign(base, theirs, source, but=("embed_tokens",))
    return CausalHead(model, fusion, [FINAL_NORM], FINAL_NORM)


def _layers_of(target: TreeLM, num_layers: int) -> Any:
    """Make a model of the target's class with attention layers alone, without weights but for what is shared."""
    config = copy.deepcopy(target.model.config)
    config.num_hidden_layers, config.layer_types = num_layers, ["full_attention"] * num_layers
    with torch.device("meta"):
        model = type(target.model)(config)
    model.set_input_embeddings(target.model.get_input_embeddings())
    model.set_output_embeddings(target.model.get_output_embeddings())
    model.base_model.rotary_emb = target.model.base_model.rotary_emb
    model.generation_config = target.model.generation_config
    return model.eval().requires_grad_(False)


def _assign(module: nn.Module, tensors: Mapping[str, Tensor], source: Any, but: tuple[str, ...] = ()) -> None:
    """Place tensors in a module that has none.

    Raises:
        ValueError: tensors are missing, too many, or of other shapes.
    """
    wanted = {name: [*value.shape] for name, value in module.state_dict().items() if not name.startswith(but)}
    given = {name: [*value.shape] for name, value in tensors.items()}
    if wanted != given:
        names = sorted(name for name in {*wanted, *given} if wanted.get(name) != given.get(name))
        name = names[0]
        raise ValueError(
            f"the MTP layers of checkpoint {str(source)!r} must have {name} {wanted.get(name, 'not at all')}, "
            f"got {given.get(name, 'none')} ({len(names)} tensors differ)"
        )
    module.load_state_dict(tensors, strict=False, assign=True)
