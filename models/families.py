"""The families that can be grafted, a row each: which modules keep a state, and how the model wants to be called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from stree.models.attention import graft_attention
from stree.models.ssd import graft_ssd
from stree.models.state import LayerSpec

__all__ = ["FAMILIES", "Family", "family_of"]


@dataclass(frozen=True, slots=True)
class Family:
    """What differs between families.

    Attributes:
        mixers: adapter of each stateful module class, by class name.
        cache_argument: keyword under which the model takes its cache.
        takes_positions: whether it takes position_ids.
    """

    mixers: Mapping[str, Callable[[Any], LayerSpec]]
    cache_argument: str = "past_key_values"
    takes_positions: bool = True


FAMILIES: Mapping[str, Family] = {
    "bamba": Family({"BambaMixer": graft_ssd, "BambaAttention": graft_attention}),
    "llama": Family({"LlamaAttention": graft_attention}),
    "mamba2": Family({"Mamba2Mixer": graft_ssd}, cache_argument="cache_params", takes_positions=False),
}


def family_of(config: Any) -> Family:
    """Find the row of a transformers config.

    Raises:
        NotImplementedError: none; the message names the supported families.
    """
    model_type = getattr(config, "model_type", type(config).__name__)
    if model_type not in FAMILIES:
        raise NotImplementedError(f"model family {model_type!r} is not supported; supported: {', '.join(FAMILIES)}")
    return FAMILIES[model_type]
