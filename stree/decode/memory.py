"""Raises before running if what a generation allocates would not fit in memory; the message shows the computation."""

from __future__ import annotations

import re
from dataclasses import dataclass

import psutil
import torch

from stree.drafters import Drafter
from stree.models.patching import is_linear, num_features
from stree.models.prefill_memory import prefill_bytes
from stree.models.state_size import StateSize, measure_state
from stree.models.tree_lm import TreeLM

__all__ = ["Extent", "arithmetic", "check_memory", "fits_in_memory", "free_bytes", "needed_bytes", "state_bytes"]

PAIR_BYTES = 10  # of a tree's masks, for every pair of its nodes: two of one byte and one of eight
LAYER = re.compile(r"(?:^|\.)\d+\.[^.]+")  # a part of a decoder layer within the name of a module
COPIES = 1.5  # of the outputs of a layer's projections: activated, gated or rotated ones beside those that they read


@dataclass(frozen=True, slots=True)
class Extent:
    """Sizes of a generation.

    Attributes:
        batch: sequences at once.
        length: most tokens that a state holds of each.
        nodes: most nodes of a tree, root included.
        prompts: prompts that one forward pass runs together.
        prompt_length: most tokens of each.
        single_rows: states of one row beside the batch's, which prompts are prefilled in.
        is_greedy: whether no token is sampled.
    """

    batch: int
    length: int
    nodes: int
    prompts: int = 1
    prompt_length: int = 1
    single_rows: int = 0
    is_greedy: bool = False


def check_memory(lm: TreeLM, drafter: Drafter, extent: Extent) -> None:
    """Refuse a generation that does not fit.

    Args:
        lm: the target.
        drafter: its models have states of the same texts.
        extent: sizes.

    Raises:
        ValueError: target and draft models need more than is free; the message shows the sum.
    """
    need, free = needed_bytes(lm, drafter, extent), free_bytes(lm.device)
    if need > free:
        models = _models(lm, drafter, extent.nodes)
        sums = " and ".join(arithmetic(model, extent.batch, extent.length, extent.nodes) for model in models)
        passing = f"{_size(_passing(models, extent))} of them in a prefill or in the logits of a step"
        raise ValueError(
            f"the states need {_size(need)}, {passing}, {sums}, and {_size(free)} are free on {lm.device}; "
            "lower max_batch, max_length or budget"
        )


def fits_in_memory(lm: TreeLM, drafter: Drafter, extent: Extent) -> bool:
    """Whether a generation fits; see ``check_memory``."""
    return needed_bytes(lm, drafter, extent) <= free_bytes(lm.device)


def needed_bytes(lm: TreeLM, drafter: Drafter, extent: Extent) -> int:
    """Bytes of all states, the contexts of one-shot heads included, and of the larger one of prefill and step."""
    rows, length = extent.batch + extent.single_rows, extent.length
    models = _models(lm, drafter, extent.nodes)
    contexts = sum(getattr(model, "context_bytes_per_token", 0) for model in drafter.models) * extent.batch * length
    states = sum(state_bytes(model, rows, length, extent.nodes) for model in models)
    return contexts + states + _passing(models, extent)


def _passing(models: list[TreeLM], extent: Extent) -> int:
    """Bytes that are free again after a prefill, which models run one after the other, or after a step."""
    step = extent.batch * sum(
        _vocabulary_bytes(model, extent, is_target=not place) for place, model in enumerate(models)
    )
    return max([step, *(_prefill_bytes(model, extent) for model in models)])  # a target without weights has neither


def _vocabulary_bytes(lm: TreeLM, extent: Extent, *, is_target: bool) -> int:
    """Bytes of a text's logits and distributions in a step: a draft model keeps the distributions that it drew from."""
    weights = lm.dtype.itemsize
    copies = weights + (4 if weights < 4 else 0) if is_target else 0  # as computed, and in float32
    copies += 0 if extent.is_greedy and is_target else max(4, weights)
    return extent.nodes * lm.vocab_size * copies


def _prefill_bytes(lm: TreeLM, extent: Extent) -> int:
    """Bytes of a prefill by transformers' forward: its own cache, and the activations and the scan of a layer."""
    length = min(extent.prompt_length, lm.chunk_size or extent.prompt_length)
    memory = _measured(lm)
    cache = memory.state + memory.window + memory.kv_per_token * length
    return extent.prompts * (cache + _activation_bytes(lm) * length) + prefill_bytes(lm, extent.prompts, length)


def _activation_bytes(lm: TreeLM) -> int:
    """Bytes of a token's activations in the widest part of a layer, with the residual and what a norm makes of it."""
    if "activations" not in lm.cache:
        widths, hidden = dict[str, int](), lm.model.get_input_embeddings().weight.shape[-1]
        for name, module in lm.model.named_modules():
            if is_linear(module) and (part := LAYER.search(name)):
                widths[part.group()] = widths.get(part.group(), 0) + num_features(module)[1]
        width = 3 * hidden + COPIES * max(widths.values(), default=hidden)
        lm.cache["activations"] = int(width * lm.dtype.itemsize)
    size: int = lm.cache["activations"]
    return size


def state_bytes(lm: TreeLM, batch: int, length: int, nodes: int) -> int:
    """Bytes of a decode state: ``batch`` texts of ``length`` tokens, each with a tree of ``nodes``."""
    return batch * sum(size * count for _, size, count in _terms(lm, length, nodes))


def arithmetic(lm: TreeLM, batch: int, length: int, nodes: int) -> str:
    """The computation of ``state_bytes`` as text."""
    terms = " + ".join(f"{count:,} {name} x {_size(size)}" for name, size, count in _terms(lm, length, nodes) if size)
    return f"{_size(state_bytes(lm, batch, length, nodes))} = {batch} texts x ({terms})"


def free_bytes(device: torch.device) -> int:
    """Bytes that can be allocated: on a device also those that its caching allocator holds unused."""
    if device.type != "cuda":
        return int(psutil.virtual_memory().available)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + kept


def _models(lm: TreeLM, drafter: Drafter, nodes: int) -> list[TreeLM]:
    """The models with states of known sizes."""
    models = [lm, *(drafter.models if nodes > 1 else ())]
    return [model for model in models if isinstance(model, TreeLM)]


def _measured(lm: TreeLM) -> StateSize:
    """Return the sizes of a state, measured once."""
    if "memory" not in lm.cache:
        lm.cache["memory"] = measure_state(lm)
    memory: StateSize = lm.cache["memory"]
    return memory


def _terms(lm: TreeLM, length: int, nodes: int) -> list[tuple[str, int, int]]:
    """Parts of a text's state: name, bytes of one, and their number."""
    memory = _measured(lm)
    return [
        ("state", memory.state + memory.window, 1),
        ("tokens", memory.kv_per_token, length),
        ("nodes", memory.stash_per_node + memory.kv_stash_per_node, nodes),
        ("pairs of nodes", PAIR_BYTES, nodes * nodes),
    ]


def _size(count: float) -> str:
    """Bytes in the largest fitting unit."""
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.1f} GB"
