"""Raises before running if the decode states would not fit in memory; the message shows the size computation."""

from __future__ import annotations

import psutil
import torch

from stree.drafters import Drafter
from stree.models.prefill_memory import prefill_bytes
from stree.models.state_size import StateSize, measure_state
from stree.models.tree_lm import TreeLM

__all__ = ["arithmetic", "check_memory", "fits_in_memory", "free_bytes", "state_bytes"]

PAIR_BYTES = 10  # of a tree's masks, for every pair of its nodes: two of one byte and one of eight


def check_memory(lm: TreeLM, drafter: Drafter, batch: int, length: int, nodes: int) -> None:
    """Refuse states that do not fit.

    Args:
        lm: the target.
        drafter: its models have states of the same texts.
        batch: sequences at once.
        length: most tokens of each.
        nodes: most nodes of a tree.

    Raises:
        ValueError: target and draft models need more than is free; the message shows the sum.
    """
    need, free = _needed(lm, drafter, batch, length, nodes), free_bytes(lm.device)
    if need > free:
        sums = " and ".join(arithmetic(model, batch, length, nodes) for model in _models(lm, drafter, nodes))
        scans = _prefill_bytes(lm, drafter, batch, length, nodes)
        if scans:
            sums += f" and {_size(scans)} for the scans of prefill"
        raise ValueError(
            f"the states need {_size(need)}, {sums}, and {_size(free)} are free on {lm.device}; "
            "lower max_batch, max_length or budget"
        )


def fits_in_memory(lm: TreeLM, drafter: Drafter, batch: int, length: int, nodes: int) -> bool:
    """Whether the states fit; see ``check_memory``."""
    return _needed(lm, drafter, batch, length, nodes) <= free_bytes(lm.device)


def _needed(lm: TreeLM, drafter: Drafter, batch: int, length: int, nodes: int) -> int:
    """Bytes of all states, of the contexts of one-shot heads, and of the scans of prefill."""
    contexts = sum(getattr(model, "context_bytes_per_token", 0) for model in drafter.models) * batch * length
    states = sum(state_bytes(model, batch, length, nodes) for model in _models(lm, drafter, nodes))
    return contexts + states + _prefill_bytes(lm, drafter, batch, length, nodes)


def _prefill_bytes(lm: TreeLM, drafter: Drafter, batch: int, length: int, nodes: int) -> int:
    """Bytes that a layer's scan takes for prompts of that length, the most of all models: they run one by one."""
    return max((prefill_bytes(model, batch, length) for model in _models(lm, drafter, nodes)), default=0)


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


def _terms(lm: TreeLM, length: int, nodes: int) -> list[tuple[str, int, int]]:
    """Parts of a text's state: name, bytes of one, and their number."""
    if "memory" not in lm.cache:
        lm.cache["memory"] = measure_state(lm)
    memory: StateSize = lm.cache["memory"]
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
