"""Count the kernels of one step of a target, per layer and per part of a layer, without a GPU.

Run: python -m benchmarks.ahead_of_time.kernel_counts [--families mamba2,bamba] [--nodes 5] [--out FILE]

A tiny model of each family verifies a tree under Triton's interpreter, with a deferred commit, as in the
middle of a text, and commits a path of it; `launch_counter` says what is counted.  Numbers of kernels do not depend on
sizes, except where a library splits a product and where mixtures of experts run expert by expert.  "before" is with
transformers' own norms, rotary positions and feed-forwards, "after" with the fused ones, "mixers" with Mamba-2 mixers
in one launch, too.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before other imports

import torch
from helpers.tiny_family_models import family_model
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

import stree
from benchmarks.ahead_of_time.launch_counter import LaunchCounter
from benchmarks.ahead_of_time.whole_step import as_on_a_gpu
from benchmarks.report import study
from stree.bench.device_clock import binary_parents
from stree.bench.records import Record

FAMILIES = (
    "mamba2", "bamba", "granitemoehybrid", "nemotron_h", "falcon_h1", "zamba2", "qwen3_next", "jamba", "llama",
)  # fmt: skip
CONTEXT = 9
# Groups of B and C as published models have them, on which depends what becomes of the gated norm.
GROUPS: Record = {
    "mamba2": {"n_groups": 1}, "bamba": {"mamba_n_groups": 1}, "granitemoehybrid": {"mamba_n_groups": 1},
}  # fmt: skip
PROVIDERS = ("before", "after", "mixers")
# Parts of a layer, in the order of the table; "layer" is the layer's own operators: residual sums and factors.
PARTS = ("norm", "mixer", "feed-forward", "layer")


@contextmanager
def counting(lm: stree.TreeLM) -> Iterator[LaunchCounter]:
    """Count what happens inside by (layer, part): layer is an index, or None outside the layers."""
    layers, parts = _places(lm)
    path: list[Any] = []  # modules whose forward runs

    def place() -> tuple[int | None, str]:
        layer = next((layers[id(module)] for module in path if id(module) in layers), None)
        part = next((parts[id(module)] for module in path if id(module) in parts), "layer")
        return layer, part if layer is not None else "outside"

    def leave(*_: Any) -> None:
        path.pop()

    handles = [
        register_module_forward_pre_hook(lambda module, _: path.append(module)),
        register_module_forward_hook(leave, always_call=True),
    ]
    try:
        with LaunchCounter(place).watching() as counter:
            yield counter
    finally:
        for handle in handles:
            handle.remove()


def _places(lm: stree.TreeLM) -> tuple[dict[int, int], dict[int, str]]:
    """Map modules, by id, to the index of their layer and to the part of it that they are."""
    (blocks,) = (
        module
        for name, module in lm.model.named_modules()
        if isinstance(module, nn.ModuleList) and name.endswith("layers") and len(module) == lm.num_layers
    )
    mixers = {id(mixer) for mixer in lm.mixers.values()}
    parts: dict[int, str] = {}
    for module in blocks.modules():
        kind = type(module).__name__
        if id(module) in mixers:
            parts[id(module)] = "mixer"
        elif kind.endswith("Norm"):
            parts[id(module)] = "norm"
        elif kind.endswith(("MLP", "MoE", "MoeBlock", "Mixture")):
            parts[id(module)] = "feed-forward"
    return {id(block): index for index, block in enumerate(blocks)}, parts


def count(family: str, nodes: int, provider: str) -> list[Record]:
    """Count one step by a tiny model of a family: a record for each kind of layer, for the rest, and for the commit.

    Args:
        family: model_type.
        nodes: of the tree, whose nodes have two children each.
        provider: one of ``PROVIDERS``.

    Returns:
        Records with launches a layer as ``value`` (the mean over layers of a kind), ``parts`` of it, and ``by_name``.
    """
    with as_on_a_gpu():
        lm = stree.TreeLM(family_model(family, torch.bfloat16, **GROUPS.get(family, {})))
        lm.fused_layers, lm.fused_mixers = provider != "before", provider == "mixers"
        state = lm.new_state(1, 64, nodes, fixed_shapes=True)
        lm.prefill(state, torch.arange(CONTEXT)[None] % lm.vocab_size)
        tokens = torch.arange(nodes)[None] % lm.vocab_size
        tree = stree.TokenTree.unchecked(tokens, binary_parents(1, nodes, lm.device))
        tree.ancestor_mask, tree.depths  # noqa: B018  # a drafter has asked for both
        path, lengths = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
        lm.verify(state, tree)
        lm.commit(state, path, lengths)
        with counting(lm) as verify:
            lm.verify(state, tree)
        with counting(lm) as commit:
            lm.commit(state, path, lengths)
    kinds = layer_kinds(lm)
    found = [_record(family, nodes, provider, kind, kinds, verify) for kind in [*dict.fromkeys(kinds), "outside"]]
    return [*found, _record(family, nodes, provider, "commit", kinds, commit)]


def _record(family: str, nodes: int, provider: str, kind: str, kinds: Sequence[str], counts: LaunchCounter) -> Record:
    """Sum the launches of all layers of a kind, or of what is outside the layers."""
    inside = [index for index, name in enumerate(kinds) if name == kind]
    layers: list[int | None] = [*inside] or [None]
    parts: Counter[str] = Counter()
    names: Counter[str] = Counter()
    for ((layer, part), what), number in counts.found.items():
        if layer in layers:
            parts[part] += number
            names[what] += number
    each = len(layers)
    return {
        "bench": "kernel_counts",
        "provider": provider,
        "params": {"family": family, "nodes": nodes, "layer": kind, "layers": each},
        "dtype": "bfloat16",
        "metric": "launches",
        "unit": "launches/layer",
        "value": parts.total() / each,
        "parts": {part: parts[part] / each for part in (*PARTS, "outside") if parts[part]},
        "by_name": {name: number / each for name, number in names.most_common()},
    }


def layer_kinds(lm: stree.TreeLM) -> list[str]:
    """Name every layer by what it holds: its mixers, and its kind of feed-forward."""
    kinds: list[list[str]] = [[] for _ in range(lm.num_layers)]
    layers, parts = _places(lm)
    for block in lm.model.modules():
        if id(block) in layers:
            held = (module for module in block.modules() if parts.get(id(module)) in ("mixer", "feed-forward"))
            kinds[layers[id(block)]] = [type(module).__name__ for module in held]
    return [" + ".join(dict.fromkeys(names)) for names in kinds]


def cells(record: Record) -> list[str]:
    """Return the line of the table: launches of a layer, in all and by part."""
    params, parts = record["params"], (f"{name} {number:.0f}" for name, number in record["parts"].items())
    layers = f"{params['layers']} x {params['layer']}"
    return [params["family"], layers, record["provider"], f"{record['value']:.0f}  ({', '.join(parts)})"]


def records(families: str = ",".join(FAMILIES), nodes: int = 5) -> Iterator[Record]:
    """Count all families by each provider.

    Args:
        families: their names, separated by commas.
        nodes: of the tree, at least 2.
    """
    if nodes < 2:
        raise ValueError(f"--nodes must be at least 2, got {nodes}")
    for family, provider in product(families.split(","), PROVIDERS):
        yield from count(family, nodes, provider)


if __name__ == "__main__":
    study(records, ["family", "layers", "provider", "launches a layer"], cells, replaces=True)
