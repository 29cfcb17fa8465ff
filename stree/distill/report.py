"""Measures of a drafter on held-out text, and its model card.

Everything is measured on the saved weights, loaded anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from stree.distill.heads import RECIPES
from stree.distill.training import Logits
from stree.drafters import Drafter
from stree.generation import generate
from stree.growth import Chain
from stree.models.tree_lm import TreeLM
from stree.sampling import Sampling

__all__ = ["agreement", "card", "measure_probs", "measure_tau"]

LOGITS_AT_ONCE = 1 << 26
NUM_PROMPTS, PROMPT_LENGTH, NEW_TOKENS = 8, 64, 64
CHAIN = 4
MODEL_RECIPE = (
    "Cross entropy on the text, then the KL divergence from the target's next-token distribution on the text and on "
    "what the target wrote."
)
HEAD_RECIPE = (
    "KL divergence from the target's next-token distribution, of the tokens of a draft, on the text and on what the "
    "target wrote."
)

RECIPES_OF = {
    "diffusion": "KL divergence from the target's next-token distribution, at the masked tokens of windows of which a "
    "random share t is masked, times 1 / t, on the text and on what the target wrote."
}
WHOLE_MODELS = {"model": "a Mamba-2", "diffusion": "a masked-diffusion model"}


def agreement(wanted: Tensor, proposed: Tensor) -> dict[str, float]:
    """Compare the drafter's distributions with the target's.

    Args:
        wanted: float32[rows, vocab] log-probabilities of the target.
        proposed: the same of the drafter.

    Returns:
        Sums over the rows: ``divergence``, KL of target to drafter in nats; ``top1``, rows with the same most likely
        token; ``accepted``, sum of min(target distribution, drafter distribution), the chance that a drafted token is
        kept.
    """
    probs = wanted.exp()
    return {
        "divergence": float((probs * (wanted - proposed)).sum()),
        "top1": float((wanted.argmax(1) == proposed.argmax(1)).sum()),
        "accepted": float(torch.minimum(probs, proposed.exp()).sum()),
    }


@torch.no_grad()
def measure_probs(
    probs: Logits, drafter: Logits, held_out: np.ndarray, length: int, device: torch.device
) -> dict[str, Any]:
    """Measure a drafter on windows of a held-out stream.

    Returns:
        Means over the tokens: ``divergence`` and both models' cross entropies in nats, ``top1`` and ``acceptance``.
    """
    names = ("divergence", "top1", "accepted", "target_cross_entropy", "drafter_cross_entropy")
    total, tokens = dict.fromkeys(names, 0.0), 0
    for window in _windows(held_out, length):
        ids = torch.from_numpy(window.astype(np.int64)).to(device)
        pair = probs(ids[None, :-1])[0], drafter(ids[None, :-1])[0]
        size = max(1, LOGITS_AT_ONCE // pair[0].shape[-1])
        for wanted, proposed, actual in zip(*(part.split(size) for part in (*pair, ids[1:, None])), strict=True):
            wanted, proposed = wanted.float().log_softmax(-1), proposed.float().log_softmax(-1)
            found = agreement(wanted, proposed)
            found["target_cross_entropy"] = -float(wanted.gather(1, actual).sum())
            found["drafter_cross_entropy"] = -float(proposed.gather(1, actual).sum())
            tokens += len(actual)
            for name, value in found.items():
                total[name] += value
    means = {name: round(value / tokens, 4) for name, value in total.items()}
    return {"tokens": tokens, "acceptance": means.pop("accepted"), **means}


def _windows(stream: np.ndarray, length: int) -> Iterator[np.ndarray]:
    """Cut a stream into windows int32[length + 1] that share their border tokens; what is left over is dropped."""
    for start in range(0, len(stream) - length, length):
        yield stream[start : start + length + 1]


def measure_tau(lm: TreeLM, drafter: Drafter, held_out: np.ndarray) -> dict[str, float]:
    """Generate from held-out beginnings with chains of 4; mean tokens emitted a step, greedy and at temperature 0.8."""
    length = min(PROMPT_LENGTH, len(held_out))
    if lm.max_length is not None:
        length = min(length, lm.max_length // 2)
    starts = np.linspace(0, len(held_out) - length, NUM_PROMPTS).astype(int)
    prompts = [held_out[start : start + length].tolist() for start in starts]
    room = NEW_TOKENS if lm.max_length is None else min(NEW_TOKENS, lm.max_length - length)
    found = {}
    for temperature in (0.0, 0.8):
        out = generate(
            lm, prompts, drafter, growth=Chain(CHAIN), budget=CHAIN + 1, sampling=Sampling(temperature),
            max_new_tokens=room, ignore_eos=True,
        )  # fmt: skip
        found[f"{temperature:g}"] = round(cast(float, out.stats["tau"]), 3)
    return found


def card(metrics: dict[str, Any]) -> str:
    """Write the drafter's card in Markdown, every figure taken from ``metrics``."""
    tau, probs = metrics["tau"], metrics.get("held_out")
    stages = [
        f"| {name} | {int(stage['steps']):,} | {int(stage['tokens']):,} | {stage['seconds'] / 60:.1f} "
        f"| {stage['loss']:.3f} |"
        for name, stage in metrics["stages"].items()
    ]
    settings = ", ".join(f"{name} {value}" for name, value in metrics["settings"].items())
    kind = str(metrics["settings"]["kind"])
    trained = RECIPES[metrics["settings"]["recipe"]]
    recipe = MODEL_RECIPE if probs else f"{RECIPES_OF.get(kind, HEAD_RECIPE)} {trained.about}".strip()
    layout = "of SpecBlock's own code" if kind == "specblock" else "of the package speculators"
    what = WHOLE_MODELS.get(kind) or f"a draft head ({kind}) in the layout {layout}"
    if trained.refinement.name != "plain":
        what += f" with tensors of the recipe {trained.refinement.name}, which other programs do not know,"
    return f"""# A drafter for {metrics["target"]}

Made by `stree distill`: {what} of {metrics["num_parameters"]:,} parameters (bfloat16) with the target's vocabulary
of {metrics["vocab_size"]:,}. Use it with `stree generate --target {metrics["target"]} --drafter FOLDER`; whatever it
drafts, the text follows the target's own distribution.

## Measured

On held-out text, the end of what it was given:

| | |
| --- | ---: |
{_probs_rows(probs) if probs else ""}| tokens a step (tau), chain of {CHAIN}, greedy | {tau["0"]:.2f} |
| tokens a step (tau), chain of {CHAIN}, temperature 0.8 | {tau["0.8"]:.2f} |

tau: {NUM_PROMPTS} beginnings of at most {PROMPT_LENGTH} tokens, at most {NEW_TOKENS} new tokens each; 1 is plain
decoding.

## Recipe

{recipe} The target wrote {metrics["generated_tokens"]:,} tokens from beginnings of the
text, which has {metrics["text_tokens"]:,}.

| part | steps | tokens | minutes | last loss, nats |
| --- | ---: | ---: | ---: | ---: |
{chr(10).join(stages)}

Settings: {settings}. Machine: {metrics["machine"]}; torch {metrics["torch"]}, transformers
{metrics["transformers"]}.
"""


def _probs_rows(probs: dict[str, Any]) -> str:
    """Rows of the card's table on distributions."""
    return f"""| divergence from the target, nats a token ({probs["tokens"]:,} tokens) | {probs["divergence"]:.3f} |
| same most likely token | {probs["top1"]:.3f} |
| chance that a sampled draft token is kept, temperature 1 | {probs["acceptance"]:.3f} |
| cross entropy, target / drafter, nats | {probs["target_cross_entropy"]:.3f} / {probs["drafter_cross_entropy"]:.3f} |
"""
