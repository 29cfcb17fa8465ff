"""Drafters by name, model or checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from stree.drafters.base import Drafter, check_vocabulary
from stree.drafters.fused import FusedDrafter
from stree.drafters.head import HeadDrafter
from stree.drafters.model import ModelDrafter
from stree.drafters.none import NoDrafter
from stree.drafters.suffix import SuffixDrafter
from stree.models.common_vocabulary import in_vocabulary_of
from stree.models.heads import formats
from stree.models.heads.causal import CausalHead
from stree.models.heads.dflash_head import OneShotHead
from stree.models.heads.diffusion import MaskedDiffusion
from stree.models.tree_lm import TreeLM

__all__ = ["DRAFTERS", "load"]

# Makes a drafter of a name for a target; one of your own may be entered under another name.
DRAFTERS: dict[str, Callable[[TreeLM], Drafter]] = {
    "suffix": lambda target: SuffixDrafter(),
    "none": lambda target: NoDrafter(),
    "mtp": lambda target: HeadDrafter(formats.load("mtp", target)),
}


def load(source: str | Path | Any, target: TreeLM) -> Drafter:
    """Return a drafter for a target; a checkpoint is loaded in every call.

    Args:
        source: "suffix" (repetitions of the text), "none" (plain decoding), "mtp" (MTP layers in the target's own
            checkpoint), "fused:PATH" (a small model or head and "suffix" in one tree), the folder or hub id
            ("owner/name") of a draft head, a masked-diffusion
            drafter or a small model of the target's vocabulary, that head or model itself
            (of transformers, or a TreeLM), or a drafter, which is returned.  Where head and vocabulary of a model are
            padded to another number of tokens than the target's, it drafts the tokens that both have.
        target: its device and dtype are those of a model that is loaded.

    Raises:
        TypeError: something else.
        ValueError: no checkpoint there, or a model of another number of tokens, whose tokenizer differs from the
            target's, or on another device.
        NotImplementedError: a model of a family that is not supported, also for "mtp".
    """
    if isinstance(source, Drafter):
        size = getattr(target, "vocab_size", None)  # generate refuses what is no model
        is_alike = size is None or all(model.vocab_size == size for model in source.models)
        return source if is_alike else source.with_model(lambda lm: in_vocabulary_of(lm, target))
    if isinstance(source, str) and source in DRAFTERS:
        return DRAFTERS[source](target)
    if isinstance(source, str) and source.partition(":")[0] == "fused":
        path = source.partition(":")[2]
        if not path:
            raise ValueError(f"'fused' needs a small model: write 'fused:PATH'; drafter may be {_known()}")
        return FusedDrafter(load(path, target), SuffixDrafter())
    if isinstance(source, (str, Path)):
        if not Path(source).is_dir() and "/" not in str(source):  # a mistake in a name must not ask the network
            raise ValueError(f"drafter must be {_known()}, got {str(source)!r}")
        if formats.head_layout(source) is not None:
            return HeadDrafter(formats.load(source, target))
        source = TreeLM.from_pretrained(source, target.device, target.dtype)
    if isinstance(source, (CausalHead, OneShotHead, MaskedDiffusion)):
        return HeadDrafter(source)
    if isinstance(source, type) or not (hasattr(source, "new_state") or hasattr(source, "config")):
        raise TypeError(f"drafter must be {_known()}, got {source!r:.80}")
    lm = in_vocabulary_of(source if hasattr(source, "new_state") else TreeLM(source), target)
    check_vocabulary(lm, target.vocab_size)
    if lm.device != target.device:
        raise ValueError(f"drafter and target must be on one device, got {lm.device} and {target.device}")
    return ModelDrafter(lm)


def _known() -> str:
    """List what ``load`` takes."""
    names = ", ".join(map(repr, DRAFTERS))
    return f"{names}, 'fused:PATH', a small model or its path, or an object derived from stree.drafters.Drafter"
