"""What ``stree info --check`` finds out about a model on this machine, as one report to attach to an issue."""

from __future__ import annotations

import platform
import statistics
import time
from typing import Any

import torch
import transformers

from stree.drafters import SuffixDrafter
from stree.generation import generate
from stree.models.self_check import layer_errors
from stree.models.tree_lm import TreeLM
from stree.tree import TokenTree

__all__ = ["check_model"]

PROMPT, NEW_TOKENS = 24, 64
SIZES, STEPS = (1, 16, 64), 20  # nodes of the timed steps, and how many
NEAR_TIE = 1e-3  # gap of two logits, relative to the largest, below which either may come out


def check_model(lm: TreeLM) -> dict[str, Any]:
    """Compare a model with transformers' own forward and ``generate``, and time steps.

    Returns:
        A JSON-able dict: versions and device, the self-check with the error of every class, whether 64 greedy tokens
        are those of ``model.generate``, and the median time of steps of 1, 16 and 64 nodes.
    """
    tokens = [(7919 * place + 13) % lm.vocab_size for place in range(PROMPT)]
    return {
        "environment": _environment(lm),
        **_self_check(lm),
        "greedy": _greedy(lm, tokens),
        "steps": _steps(lm, tokens),
    }


def _environment(lm: TreeLM) -> dict[str, Any]:
    """Describe the machine and the model, without names of folders."""
    device = torch.cuda.get_device_name(lm.device) if lm.device.type == "cuda" else platform.processor()
    config = {key: value for key, value in lm.model.config.to_dict().items() if key != "_name_or_path"}
    return {
        "python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
        "device": f"{lm.device}: {device}", "threads": torch.get_num_threads(), "dtype": str(lm.dtype),
        "class": type(lm.model).__name__, "layers": [spec.kind for spec in lm.specs.values()],
        "config": {key: value for key, value in config.items() if isinstance(value, (int, float, str, bool, list))},
    }  # fmt: skip


def _self_check(lm: TreeLM) -> dict[str, Any]:
    """Run the self-check; its message if it fails."""
    report: dict[str, Any] = {"layer_errors": layer_errors(lm), "self_check": "passed"}
    try:
        lm.self_check()
    except (NotImplementedError, RuntimeError) as error:
        report["self_check"] = str(error)
    return report


def _greedy(lm: TreeLM, tokens: list[int]) -> dict[str, Any]:
    """Compare greedy text through trees with ``model.generate``'s."""
    found = generate(lm, [tokens], SuffixDrafter(), budget=16, max_new_tokens=NEW_TOKENS).sequences[0]
    ids = torch.tensor([tokens], device=lm.device)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        expected = lm.model.generate(ids, **options)[0].tolist()
    pairs = zip(found, expected, strict=False)
    place = next(
        (place for place, (mine, theirs) in enumerate(pairs) if mine != theirs), min(len(found), len(expected))
    )
    if found == expected:
        return {"is_equal": True, "num_tokens": len(found) - len(tokens)}
    report = {
        "is_equal": False,
        "first_difference": place - len(tokens),
        "tokens": [found[place:][:1], expected[place:][:1]],
    }
    if place < min(len(found), len(expected)):
        state = lm.new_state(1, place, 1)
        logits = lm.prefill(state, torch.tensor([expected[:place]]))[0].double()
        gap = float((logits[found[place]] - logits[expected[place]]).abs() / logits.abs().max())
        report |= {"logit_gap": gap, "is_near_tie": gap < NEAR_TIE}
    return report


def _steps(lm: TreeLM, tokens: list[int]) -> list[dict[str, Any]]:
    """Time verify and commit of trees of a few sizes; a step commits its root."""
    report: list[dict[str, Any]] = []
    for nodes in SIZES:
        state = lm.new_state(1, len(tokens) + STEPS + 2 + nodes, nodes)
        lm.prefill(state, torch.tensor([tokens]))
        parents = torch.tensor(
            [-1, *((node - 1) // 2 for node in range(1, nodes))], dtype=torch.int32, device=lm.device
        )
        tree = TokenTree(torch.arange(nodes, device=lm.device) % lm.vocab_size, parents)
        path, one = (
            torch.full(shape, fill, dtype=torch.int32, device=lm.device) for shape, fill in (((1, 1), 0), ((1,), 1))
        )
        times = []
        for _ in range(STEPS + 2):
            _synchronise(lm)
            began = time.perf_counter()
            lm.verify(state, tree)
            lm.commit(state, path, one)
            _synchronise(lm)
            times.append(1e3 * (time.perf_counter() - began))
        median = statistics.median(times[2:])
        ratio = median / report[0]["median_ms"] if report else 1.0
        report.append({"nodes": nodes, "median_ms": median, "steps": STEPS, "over_one_node": ratio})
    return report


def _synchronise(lm: TreeLM) -> None:
    if lm.device.type == "cuda":
        torch.cuda.synchronize(lm.device)
