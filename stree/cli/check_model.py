"""``stree info --check``: run a checkpoint and compare it with transformers; the findings go into one JSON file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from stree.bench.device_clock import time_calls, tree_step
from stree.bench.records import environment
from stree.cli.check_device import SIZES, attempted, compare_with_forwards, without_names
from stree.files import replacing
from stree.generation import generate
from stree.inputs import load_tokenizer, locate
from stree.models.loading import load_config
from stree.models.state_size import measure_state
from stree.models.tree_lm import TreeLM

__all__ = ["check_checkpoint", "write_report"]

PROMPT = "The river rises in the mountains, crosses the plain and"
NEW_TOKENS, CONTEXT, STEPS = 64, 64, 20


def check_checkpoint(name: str, *, device: str, dtype: str, trust_remote_code: bool = False) -> dict[str, Any]:
    """Load a checkpoint and compare it with transformers.

    Args:
        name: 'bundled', a folder, or a hub id.
        device: as for ``TreeLM.from_pretrained``.
        dtype: likewise.
        trust_remote_code: likewise.

    Returns:
        A JSON-able dict without paths of this machine.  "ok" says whether all agrees; a part that fails has an "error".

    Raises:
        ValueError: the checkpoint cannot be loaded.
    """
    path = locate(name, "target")
    config = load_config(path, trust_remote_code=trust_remote_code)
    shown = Path(name).resolve().name if os.path.exists(name) else name
    report: dict[str, Any] = {
        "stree": version("stree"),
        "env": environment(),
        "model": shown,
        "config": _without_paths(config.to_dict()),
    }
    try:
        lm = TreeLM.from_pretrained(path, device, dtype, trust_remote_code=trust_remote_code)
    except NotImplementedError as error:  # the class of a changed layer is named
        return {**report, "ok": False, "error": without_names(f"{type(error).__name__}: {error}")}
    prompt = _prompt(path, lm, trust_remote_code)
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "self_check": partial(compare_with_forwards, lm), "text": partial(_compare_texts, lm, prompt),
        "steps": partial(_steps, lm),
    }  # fmt: skip
    found = {part: attempted(run) for part, run in parts.items()}
    return {
        **report, "env": environment(lm.device), "class": type(lm.model).__name__, "dtype": str(lm.dtype)[6:],
        "layers": measure_state(lm).layers,
        **found, "ok": all(part.get("ok", "error" not in part) for part in found.values()),
    }  # fmt: skip


def write_report(report: dict[str, Any], path: Path) -> None:
    """Write a report.

    Raises:
        ValueError: the file cannot be written.
    """
    with replacing(path) as beside:
        beside.write_text(json.dumps(_without_paths(report), indent=1, default=str) + "\n", encoding="utf-8")


def _without_paths(value: Any) -> Any:
    """Leave absolute paths, and where a config was loaded from, out of a config's dict."""
    if isinstance(value, dict):
        kept = {key: part for key, part in value.items() if key != "_name_or_path" and not _is_path(part)}
        return {key: _without_paths(part) for key, part in kept.items()}
    if isinstance(value, list | tuple):
        return [_without_paths(part) for part in value if not _is_path(part)]
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)  # JSON has no infinity


def _is_path(value: Any) -> bool:
    return isinstance(value, str | Path) and os.path.isabs(value)


def _prompt(path: str, lm: TreeLM, trust_remote_code: bool) -> list[int]:
    """Return a few words as tokens; arbitrary tokens where there is no tokenizer."""
    try:
        return list(load_tokenizer(path, trust_remote_code=trust_remote_code)(PROMPT)["input_ids"])
    except ValueError:
        return [lm.vocab_size // (token + 2) for token in range(12)]


def _compare_texts(lm: TreeLM, prompt: list[int]) -> dict[str, Any]:
    """Compare greedy tokens of stree and of transformers; a first difference within rounding is a near-tie."""
    found = generate(lm, [prompt], budget=16, max_new_tokens=NEW_TOKENS)
    out: Any = lm.model.generate(
        torch.tensor([prompt], device=lm.device), attention_mask=torch.ones(1, len(prompt), device=lm.device).long(),
        max_new_tokens=NEW_TOKENS, do_sample=False, num_beams=1, repetition_penalty=1.0, no_repeat_ngram_size=0,
        pad_token_id=0, output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    ours, theirs = found.sequences[0][len(prompt) :], out.sequences[0, len(prompt) :].tolist()
    stats = {name: found.stats[name] for name in ("steps", "tau", "tokens_per_s", "graphs") if name in found.stats}
    report = {"num_tokens": [len(ours), len(theirs)], "equal": ours == theirs, "stats": stats, "ok": ours == theirs}
    pairs = enumerate(zip(ours, theirs, strict=False))
    at = next((step for step, (one, other) in pairs if one != other), None)
    if at is None:
        return report
    logits = out.logits[at][0].float()
    gap = float(logits[theirs[at]] - logits[ours[at]])
    # Of the largest logit; sums of half precision are rounded in another order.
    rounding = 2 * torch.finfo(lm.dtype).eps if lm.dtype.itemsize == 2 else 1e-4
    is_near_tie = gap <= rounding * float(logits[logits.isfinite()].abs().max())
    difference = {"position": at, "tokens": [ours[at], theirs[at]], "logit_gap": gap, "is_near_tie": is_near_tie}
    return {**report, "first_difference": difference, "ok": is_near_tie}


@torch.no_grad()
def _steps(lm: TreeLM) -> dict[str, Any]:
    """Time verifying a binary tree and committing its root, launched and not captured: median ms by nodes."""
    medians = {nodes: time_calls(tree_step(lm, nodes, CONTEXT), lm.device, runs=STEPS)["p50"] for nodes in SIZES}
    return {
        "count": STEPS, "is_captured": False,
        "median_ms": {str(nodes): time_us / 1e3 for nodes, time_us in medians.items()},
        "over_one_node": {str(nodes): time_us / medians[1] for nodes, time_us in medians.items()},
    }  # fmt: skip
