"""Which head a checkpoint holds, by its config and the names of its tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING

from stree.models.heads.causal import CausalHead
from stree.models.heads.mtp import load_mtp, load_speculators_mtp
from stree.models.loading import raw_config
from stree.models.tree_lm import TreeLM

__all__ = ["is_head", "load"]


def load(source: str | Path, target: TreeLM) -> CausalHead:
    """Load a draft head.

    Args:
        source: "mtp" for the MTP layers in the checkpoint that the target was loaded from, or the folder or hub id of
            a head in the layout of speculators.
        target: the head is placed on its device, in its dtype, and may share its embedding and output head.

    Raises:
        NotImplementedError: a layout that is not known.
        ValueError: the checkpoint cannot be read, or does not fit the target.
    """
    if source == "mtp":
        return load_mtp(target)
    config = raw_config(source)
    kind = config.get("speculators_model_type")
    if kind == "mtp":
        return load_speculators_mtp(target, source, _layer_config(config))
    raise NotImplementedError(f"the layout of draft head {str(source)!r} is not known ({kind!r}); known are 'mtp'")


def is_head(source: str | Path) -> bool:
    """Whether a folder or hub id holds a draft head, by its config.json.

    Raises:
        ValueError: there is none that can be read.
    """
    return "speculators_model_type" in raw_config(source)


def _layer_config(config: Any) -> Any:
    """Return the transformers config of a head's layers."""
    layer = dict(config["transformer_layer_config"])
    return CONFIG_MAPPING[layer.pop("model_type")](**layer)
