"""How much memory decoding with a model takes, read off the tensors that it would allocate.

It works on models without weights: on the meta device tensors have sizes and no memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from stree.models.families import config_of_text_model
from stree.models.tree_lm import TreeLM

__all__ = ["StateSize", "empty_model", "measure_state", "modules_by_kind", "weight_bytes"]

KINDS = {
    "Mamba2Stack": "Mamba-2",
    "Mamba1Stack": "Mamba-1",
    "DeltaStack": "gated delta rule",
    "LightningStack": "lightning attention",
    "RgLruStack": "RG-LRU",
    "ShortConvStack": "short convolution",
    "KvStack": "attention",
    "LatentStack": "latent attention",
}


@dataclass(frozen=True, slots=True)
class StateSize:
    """Bytes of one sequence.

    Attributes:
        layers: number of layers by what they keep; a layer may keep two things.
        state: recurrent states, whatever the length: one full snapshot.
        window: last inputs of the convolutions.
        kv_per_token: keys and values of a committed token.
        stash_per_node: factors of a pending node, inputs of convolutions included, keys and values not.
        kv_stash_per_node: keys and values of a pending node.
    """

    layers: dict[str, int]
    state: int
    window: int
    kv_per_token: int
    stash_per_node: int
    kv_stash_per_node: int


def empty_model(config: PreTrainedConfig, dtype: torch.dtype, *, trust_remote_code: bool = False) -> Any:
    """Build a model without weights, on the meta device."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of_text_model(config), trust_remote_code=trust_remote_code)
    return model.to(dtype)


def measure_state(lm: TreeLM) -> StateSize:
    """Read the sizes of a state for one token and one node off its tensors."""
    layers: dict[str, int] = {}
    sums = dict.fromkeys(("state", "window", "kv", "stash", "kv_stash"), 0)
    for stack in lm.new_state(1, 1, 1).stacks.values():
        kind = type(stack).__name__
        keeps_keys, tensors = hasattr(stack, "keys"), stack.sequence_tensors()
        layers[KINDS[kind]] = layers.get(KINDS[kind], 0) + len(tensors[0][1])
        for name, tensor in tensors:
            is_stash = name.startswith("stash")
            part = ("kv_stash" if is_stash else "kv") if keeps_keys else ("stash" if is_stash else name)
            sums[part] += tensor.nbytes
    return StateSize(layers, sums["state"], sums["window"], sums["kv"], sums["stash"], sums["kv_stash"])


def modules_by_kind(lm: TreeLM) -> list[tuple[str, Any]]:
    """List the modules that keep something of a sequence, each once, with what it keeps."""
    state = lm.new_state(1, 1, 1)
    kinds = {spec: KINDS[type(stack).__name__] for spec, stack in state.stacks.items()}
    named: dict[int, tuple[list[str], Any]] = {}
    for site, module in lm.mixers.items():
        named.setdefault(id(module), ([], module))[0].append(kinds[state.specs[site]])
    return [(" and ".join(dict.fromkeys(names)), module) for names, module in named.values()]


def weight_bytes(lm: TreeLM) -> int:
    """Count the bytes of all weights that a forward pass reads whole: all but an untied input embedding."""
    embedding, head = lm.model.get_input_embeddings().weight, lm.model.get_output_embeddings().weight
    whole = {id(weight): weight.nbytes for weight in lm.model.parameters()}
    if embedding is not head:
        whole.pop(id(embedding))
    return sum(whole.values())
