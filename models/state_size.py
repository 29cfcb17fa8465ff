"""Memory of a model's decode state, measured on the tensors of a state for one token and one node.

Models without weights (meta device) can be measured, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from stree.models.families import config_of_text_model
from stree.models.tree_lm import TreeLM

__all__ = ["StateSize", "empty_model", "measure_state", "modules_by_kind", "weight_bytes"]


@dataclass(frozen=True, slots=True)
class StateSize:
    """Bytes of one sequence.

    Attributes:
        layers: number of layers by kind; a layer of two kinds counts twice.
        state: recurrent states at any length: one full snapshot.
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
    """Build a model without weights, on the meta device.

    Raises:
        ValueError: a config of which transformers can make none.
    """
    config = config_of_text_model(config)
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code).to(dtype)
    except Exception as error:  # a damaged config raises whatever it meets in transformers
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(f"transformers makes no model of this config of {config.model_type}: {reason}") from error


def measure_state(lm: TreeLM) -> StateSize:
    """Return the sizes of a state of one sequence."""
    layers: dict[str, int] = {}
    sums = dict.fromkeys(("state", "window", "kv", "stash", "kv_stash"), 0)
    for spec, stack in lm.new_state(1, 1, 1).stacks.items():
        has_keys, tensors = hasattr(stack, "keys"), stack.sequence_tensors()
        layers[spec.kind] = layers.get(spec.kind, 0) + len(tensors[0][1])
        for name, tensor in tensors:
            is_stash = name.startswith("stash")
            part = ("kv_stash" if is_stash else "kv") if has_keys else ("stash" if is_stash else name)
            sums[part] += tensor.nbytes
    return StateSize(layers, sums["state"], sums["window"], sums["kv"], sums["stash"], sums["kv_stash"])


def modules_by_kind(lm: TreeLM) -> list[tuple[str, Any]]:
    """List the stateful modules, each once, with the kind of its state, or kinds where several layers share it."""
    named: dict[int, tuple[list[str], Any]] = {}
    for site, module in lm.mixers.items():
        named.setdefault(id(module), ([], module))[0].append(lm.specs[site].kind)
    return [(" and ".join(dict.fromkeys(names)), module) for names, module in named.values()]


def weight_bytes(lm: TreeLM) -> int:
    """Count the bytes of all weights that a forward pass reads whole: all but an untied input embedding."""
    embedding, head = lm.model.get_input_embeddings().weight, lm.model.get_output_embeddings().weight
    whole = {id(weight): weight.nbytes for weight in lm.model.parameters()}
    if embedding is not head:
        whole.pop(id(embedding))
    return sum(whole.values())
