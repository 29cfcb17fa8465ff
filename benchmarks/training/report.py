"""Measures of the bundled pair on held-out documents, and the model card written from them.

Everything is measured on the saved bfloat16 weights, reloaded in float32 and run through transformers' own forward.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from benchmarks.training.data import HELD_OUT, MIXTURE, Document
from stree.distill.report import agreement
from stree.models.prefill_functions import route_model

WINDOW = 1024
"""Most tokens a forward pass sees while measuring."""


def windows(tokens: Sequence[int], eos: int, window: int) -> Iterator[tuple[list[int], int]]:
    """Cut a document into windows that score every token once, half a window of context before all but the first.

    Yields:
        The window's tokens, the first starting with end-of-text, and how many of its last tokens it scores.
    """
    text = [eos, *tokens]
    scored = 1
    while scored < len(text):
        end = min(len(text), window if scored == 1 else scored + window // 2)
        yield text[max(0, end - window) : end], end - scored
        scored = end


@torch.no_grad()
def log_probs(model: PreTrainedModel, piece: list[int], count: int) -> Tensor:
    """Log-probabilities of every token in place of the last `count` tokens of a window: (count, vocab)."""
    logits = model(torch.tensor([piece], device=model.device), use_cache=False).logits[0]
    return cast(Tensor, logits)[-count - 1 : -1].float().log_softmax(-1)


def measure(
    target: PreTrainedModel,
    drafter: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    documents: Sequence[Document],
    size: int,
) -> dict[str, float]:
    """Bits per byte of both models and their agreement on whole documents, at least `size` bytes where there are.

    Returns:
        `bytes`, `tokens`, `target_bits_per_byte`, `drafter_bits_per_byte`, `top1_agreement` and
        `expected_acceptance`, the mean over positions of sum min(target distribution, drafter distribution) at
        temperature 1.
    """
    chosen: list[Document] = []
    for document in documents:
        if sum(len(d.text.encode()) for d in chosen) < size:
            chosen.append(document)
    total = {"bytes": 0, "tokens": 0, "target": 0.0, "drafter": 0.0, "top1": 0.0, "accepted": 0.0}
    for document in track(chosen, "measure", console=Console(stderr=True)):
        total["bytes"] += len(document.text.encode())
        tokens = tokenizer.backend_tokenizer.encode(document.text).ids
        for piece, count in windows(tokens, int(tokenizer.eos_token_id), WINDOW):
            wanted, proposed = log_probs(target, piece, count), log_probs(drafter, piece, count)
            actual = torch.tensor(piece[-count:], device=wanted.device)[:, None]
            total["tokens"] += count
            total["target"] -= float(wanted.gather(1, actual).sum())
            total["drafter"] -= float(proposed.gather(1, actual).sum())
            found = agreement(wanted, proposed)
            total["top1"] += found["top1"]
            total["accepted"] += found["accepted"]
    bits = math.log(2.0) * total["bytes"]
    return {
        "bytes": total["bytes"],
        "tokens": total["tokens"],
        "target_bits_per_byte": round(total["target"] / bits, 4),
        "drafter_bits_per_byte": round(total["drafter"] / bits, 4),
        "top1_agreement": round(total["top1"] / total["tokens"], 4),
        "expected_acceptance": round(total["accepted"] / total["tokens"], 4),
    }


def measure_folder(assets: Path, documents: Sequence[Document], size: int, device: str) -> dict[str, dict[str, float]]:
    """Reload the saved pair in float32 and measure it on the held-out documents of every kind."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(assets / "target")
    target, drafter = (
        AutoModelForCausalLM.from_pretrained(assets / kind, dtype=torch.float32).to(device).eval()
        for kind in ("target", "drafter")
    )
    route_model(target)
    route_model(drafter)
    found = {}
    for kind in MIXTURE:
        held_out = [d for d in documents if d.kind == kind and d.held_out]
        if held_out:
            found[kind] = measure(target, drafter, tokenizer, held_out, size)
    return found


def model_card(metrics: dict) -> str:
    """Model card in Markdown, every figure taken from `metrics`."""
    stages, sizes, rows = metrics["stages"], metrics["sizes"], []
    for kind, m in metrics["held_out"].items():
        rows.append(
            f"| {kind} | {m['bytes']:,} | {m['target_bits_per_byte']:.3f} | {m['drafter_bits_per_byte']:.3f} "
            f"| {m['top1_agreement']:.3f} | {m['expected_acceptance']:.3f} |"
        )
    stage_rows = [
        f"| {name} | {int(s['tokens']):,} | {s['seconds'] / 60:.1f} | {s['loss']:.3f} |" for name, s in stages.items()
    ]
    mixture = ", ".join(f"{share:.0%} {kind}" for kind, share in MIXTURE.items())
    return f"""# The bundled pair

Two small models trained from random weights for examples, tests and benchmarks of `stree`; no pretrained weights are
in them.  They continue Python code, English prose and grade-school word problems, and know little else.

| | class | parameters |
| --- | --- | ---: |
| `target/` | `BambaForCausalLM`: {sizes["target"]["layers"]} layers, attention at every fourth, Mamba-2 elsewhere | \
{metrics["target_parameters"]:,} |
| `drafter/` | `Mamba2ForCausalLM`: {sizes["drafter"]["layers"]} layers | {metrics["drafter_parameters"]:,} |

Both hold bfloat16 weights and one byte-level BPE of {metrics["vocab_size"]:,} entries.  `<|endoftext|>` (id 0) ends
every document.  The target saw windows of {metrics["window"]} tokens in training: do not expect sense far beyond.

## Measured on held-out text

On whole documents that neither the tokenizer nor a model saw, of these packages and books, with the saved weights in
float32, windows of {WINDOW} tokens and half a window of context:
{", ".join(f"`{name}`" for name in HELD_OUT)}.

Agreement: share of positions at which both models have the same most likely token.  Acceptance: mean of
1 - total variation between the two distributions, the chance that one sampled draft token is kept at temperature 1.

| text | bytes | target, bits a byte | drafter, bits a byte | agreement | acceptance |
| --- | ---: | ---: | ---: | ---: | ---: |
{chr(10).join(rows)}

## Training

| stage | tokens | minutes | last loss, nats |
| --- | ---: | ---: | ---: |
{chr(10).join(stage_rows)}

Mixture: {mixture}.  The drafter is trained on the text, then on the KL divergence from the
target's next-token distribution, where up to half of the windows come from {metrics["sampled_tokens"]:,} tokens that
the target sampled at temperature 1.  Machine: {metrics["machine"]}; torch {metrics["torch"]}, transformers
{metrics["transformers"]}.  Recipe, all commands run (`--resume` continues an interrupted one):

{chr(10).join("    " + command for command in metrics["commands"])}

## Data and licences

- Python: the CPython 3.11 standard library (PSF-2.0) and BSD, MIT and Apache-2.0 packages from PyPI.
- English: public-domain books, Python PEPs (public domain or CC0-1.0), Rust RFCs (MIT or Apache-2.0).
- Word problems: the training part of GSM8K (openai/grade-school-math, MIT).  Its test part, HumanEval and MT-Bench were
  not trained on.
"""
