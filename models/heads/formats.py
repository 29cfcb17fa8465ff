"""Which head a checkpoint holds, by its config."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING

from stree.models.heads.causal import CausalHead
from stree.models.heads.dflash import load_dflash
from stree.models.heads.dflash_head import OneShotHead
from stree.models.heads.diffusion import ARCHITECTURE, MaskedDiffusion, load_diffusion
from stree.models.heads.eagle3 import load_eagle3
from stree.models.heads.mtp import load_mtp, load_speculators_mtp
from stree.models.heads.refinements import refinement_of
from stree.models.heads.specblock import load_specblock
from stree.models.heads.weights import tensor_files
from stree.models.loading import raw_config, reason_of
from stree.models.tree_lm import TreeLM

__all__ = ["head_layout", "load"]

LAYOUTS = ("mtp", "eagle3", "dflash", "dflash2", "dspark")  # of the package speculators
ARCHITECTURES = {  # in config.json, of each layout that has no speculators_model_type
    "LlamaForCausalLMEagle3": "eagle3",  # SpecForge, ModelOpt
    "Eagle3LlamaForCausalLM": "eagle3",  # AngelSlim
    "Qwen3Eagle3Model": "eagle3",  # DeepSpec
    "DFlashDraftModel": "dflash",  # z-lab, SpecForge
    "DFlash2DraftModel": "dflash2",  # z-lab
    "Qwen3DSparkModel": "dspark",  # DeepSpec, whose DFlash heads have a markov_rank of 0
    "DSparkDraftModel": "dspark",  # SpecForge
    "Lfm2DSparkDraftModel": "dspark",  # LiquidAI
    "LlamaForCausalLMSpecBlock": "specblock",
    "LlamaForCausalLMSpecBlockShift": "specblock",
    ARCHITECTURE: "diffusion",
}
# Entries of config.json that models have not, and heads whose architecture is not known.
SIGNS = ("dflash_config", "eagle_config", "target_layer_ids", "draft_vocab_size", "speculators_config")


def load(source: str | Path, target: TreeLM) -> CausalHead | OneShotHead | MaskedDiffusion:
    """Load a draft head.

    Args:
        source: "mtp" for the MTP layers in the checkpoint that the target was loaded from; or the folder or hub id of a
            head: MTP, EAGLE-3, DFlash, DFlash2 or DSpark in the layout of speculators; EAGLE-3 in those of EAGLE,
            SpecForge, AngelSlim and DeepSpec; DFlash and DFlash2 in that of z-lab; DSpark in those of DeepSpec,
            SpecForge and LiquidAI; SpecBlock in its own; a masked-diffusion drafter of ``stree distill``.
        target: the head is placed on its device, in its dtype, and may share its embedding and output head.

    Raises:
        NotImplementedError: a layout or variant that is not known; the message lists the tensors found.
        ValueError: the checkpoint cannot be read, holds no head, or was made for a target of other sizes.
    """
    if isinstance(source, str) and source == "mtp":
        return load_mtp(target)
    try:
        return _load(source, target)
    except (NotImplementedError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # of odd entries and damaged files; transformers, torch and JSON each raise their own
        if isinstance(error, ValueError) and str(source) in str(error):
            raise
        raise ValueError(f"draft head {str(source)!r} cannot be read: {reason_of(error)}") from error


def _load(source: str | Path, target: TreeLM) -> CausalHead | OneShotHead | MaskedDiffusion:
    """Load the head of a folder or hub id by its layout."""
    layout, published, files = head_layout(source), raw_config(source), tensor_files(source)
    if layout is None:
        names = ", ".join(sorted(files)[:4])
        raise ValueError(
            f"checkpoint {str(source)!r} holds no draft head by its config.json; its tensors: {names}, ..."
        )
    _check_layers(source, published, max(len(files), target.num_layers))
    if layout == "mtp":
        return load_speculators_mtp(target, source, _layer_config(published), refinement_of(published, source))
    if layout == "specblock":
        return load_specblock(target, source, published)
    if layout == "diffusion":
        return load_diffusion(target, source, published)
    return load_eagle3(target, source, published) if layout == "eagle3" else load_dflash(source, target)


def head_layout(source: str | Path) -> str | None:
    """Return the layout of the draft head that a folder or hub id holds, by its config.json; None where it holds none.

    Raises:
        NotImplementedError: a head of another layout.
        ValueError: no config there that can be read.
    """
    published = raw_config(source)
    architectures, kind = published.get("architectures") or [], published.get("speculators_model_type")
    if kind is not None:
        if kind not in LAYOUTS:
            raise NotImplementedError(
                f"the layout of draft head {str(source)!r} is not known ({kind!r}); known: {', '.join(LAYOUTS)}"
            )
        return str(kind)
    found = next((ARCHITECTURES[name] for name in architectures if name in ARCHITECTURES), None)
    if found is None and "LlamaForCausalLM" in architectures and "draft_vocab_size" in published:
        return "eagle3"  # EAGLE's own heads are named as a model, which has no draft_vocab_size
    if found is None and any(sign in published for sign in SIGNS):
        raise NotImplementedError(
            f"draft head {str(source)!r} has architectures {architectures}; known are {', '.join(ARCHITECTURES)}"
        )
    return found


def _check_layers(source: str | Path, published: Mapping[str, Any], most: int) -> None:
    """Refuse more layers than there are tensors, before transformers lists them; MTP layers may name the target's."""
    sizes = published.get("transformer_layer_config") or published
    for name in ("num_hidden_layers", "num_layers"):
        if isinstance(sizes.get(name), int) and sizes[name] > most:  # what else it may be transformers refuses
            raise ValueError(f"draft head {str(source)!r} must have {name} of at most {most}, got {sizes[name]}")


def _layer_config(config: Mapping[str, Any]) -> Any:
    """Return the transformers config of a head's layers."""
    layer = dict(config["transformer_layer_config"])
    return CONFIG_MAPPING[layer.pop("model_type")](**layer)
