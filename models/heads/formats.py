"""Which head a checkpoint holds, by its config and the names of its tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING

from stree.models.heads.causal import CausalHead
from stree.models.heads.mtp import load_mtp, load_speculators_mtp
from stree.models.loading import raw_config
from stree.models.tree_lm import TreeLM

__all__ = ["head_layout", "load"]

LAYOUTS = ("mtp",)


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
    layout = head_layout(source)
    if layout is None:
        raise ValueError(f"checkpoint {str(source)!r} holds no draft head, by its config.json")
    return load_speculators_mtp(target, source, _layer_config(raw_config(source)))


def head_layout(source: str | Path) -> str | None:
    """Return the layout of the draft head that a folder or hub id holds, by its config.json; None where it holds none.

    Raises:
        NotImplementedError: a head of another layout.
        ValueError: no config there that can be read.
    """
    kind: str | None = raw_config(source).get("speculators_model_type")
    if kind not in (None, *LAYOUTS):
        known = ", ".join(LAYOUTS)
        raise NotImplementedError(f"the layout of draft head {str(source)!r} is not known ({kind!r}); known: {known}")
    return kind


def _layer_config(config: Any) -> Any:
    """Return the transformers config of a head's layers."""
    layer = dict(config["transformer_layer_config"])
    return CONFIG_MAPPING[layer.pop("model_type")](**layer)
