"""Whether an output is the target's: token identity, the logit gap where two texts part, and a test of sampled text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from scipy.stats import chisquare

from stree.bench.execute import Case, Run, execute
from stree.bench.methods import Method
from stree.bench.pair import Pair
from stree.bench.records import Record
from stree.sampling import Sampling

__all__ = ["compare", "divergence", "is_coupled", "law_test", "places_in_law", "verifier_name"]

# Two passes of one model over one text differ by up to 1e-4 of the logit scale in float32 (the project's own bar), so
# two logits may change places where they are closer than twice that.  bfloat16 has 8 bits of mantissa.
NEAR_TIE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
BINS = 20
ALPHA = 1e-4  # a run tests some dozen methods, so that a lossless one is called wrong about once in a thousand runs


def verifier_name(method: Method, temperature: float, run: Run) -> str:
    """Say which rule accepted: greedy, match, or the one asked for; "none" for another library."""
    if method.is_peer:
        return "none"
    if temperature == 0:
        return "greedy"
    return "match" if method.verifier == "auto" and not run.counts.has_laws else method.verifier


def is_coupled(verifier: str) -> bool:
    """Tell whether the text must be plain decoding's with the same seed, token for token."""
    return verifier in ("greedy", "match")


def compare(pair: Pair, prompt: Sequence[int], tokens: Sequence[int], wanted: Sequence[int]) -> Record:
    """Compare a greedy output with the reference: identical, or how near a tie their first difference is.

    Returns:
        lossless: identical, or apart first at a near-tie; with its place, logit gap and the logits' scale.
    """
    if list(tokens) == list(wanted):
        return {"lossless": True, "identical": True}
    place = next((i for i, (a, b) in enumerate(zip(tokens, wanted, strict=False)) if a != b), None)
    if place is None:
        return {"lossless": False, "identical": False, "lengths": [len(tokens), len(wanted)]}
    logits = pair.plain_logits([*prompt, *wanted[:place]])[-1].float()
    gap = float(logits[wanted[place]] - logits[tokens[place]])
    scale = float(logits.abs().max())
    report = {"identical": False, "first_divergence": place, "logit_gap": gap, "logit_scale": scale}
    return {"lossless": abs(gap) <= NEAR_TIE[pair.target.dtype] * scale, **report}


def places_in_law(pair: Pair, case: Case, outputs: Sequence[Sequence[int]], rng: np.random.Generator) -> list[float]:
    """Find where each token stands in the target's own law of it, likely tokens first, spread evenly inside its mass.

    Given the text before it, a token drawn from that law has a place that is uniform on [0, 1) and independent of the
    places before (the probability integral transform), whatever tree it came from.
    """
    places: list[float] = []
    sampling = Sampling(case.temperature)
    for prompt, tokens in zip(case.prompts, outputs, strict=True):
        logits = pair.plain_logits([*prompt, *tokens])[len(prompt) - 1 : -1]
        ordered, order = sampling.law(logits.double()).sort(dim=-1, descending=True, stable=True)
        token = torch.tensor(list(tokens), device=order.device)
        rank = (order == token[:, None]).long().argmax(-1, keepdim=True)
        mass = ordered.gather(-1, rank)
        below = ordered.cumsum(-1).gather(-1, rank) - mass
        noise = torch.tensor(rng.random(len(tokens)))
        places += (below + mass * noise.to(mass)[:, None]).squeeze(-1).tolist()
    return places


def law_test(pair: Pair, method: Method, case: Case, texts: int) -> Record:
    """Test sampled text against the target's law: chi-square of the tokens' places, first tokens left out.

    Args:
        pair: the models.
        method: what generates.
        case: prompts and temperature; seeds are counted from its own.
        texts: texts a prompt.

    Returns:
        lossless: False where chance gives such places less than once in 10,000 times; with p_value and num_tokens.
    """
    rng = np.random.default_rng(case.seed)
    places: list[float] = []
    for number in range(texts):
        one = Case(case.prompts, case.new_tokens, case.temperature, case.seed + number)
        outputs = execute(pair, method, one).tokens
        found = places_in_law(pair, one, outputs, rng)
        # The first token is drawn from the prompt's own logits before any tree.
        places += [place for number, place in enumerate(found) if number % case.new_tokens]
    counts = np.histogram(places, BINS, (0.0, 1.0))[0]
    p_value = float(chisquare(counts).pvalue)
    return {"lossless": p_value >= ALPHA, "p_value": p_value, "num_tokens": len(places)}


def divergence(pair: Pair, case: Case, outputs: Sequence[Sequence[int]]) -> Record:
    """Measure how far the drafter is from the target along a text: mean bits of divergence and total variation.

    Laws are those of ``case.temperature``, or of temperature 1 for a greedy run.

    Returns:
        kl_bits: D(target || drafter) a token; total_variation: 1 - the chance that one sampled draft is accepted.
    """
    if pair.drafter is None:
        return {}
    sampling = Sampling(case.temperature or 1.0)
    bits, apart = [], []
    for prompt, tokens in zip(case.prompts, outputs, strict=True):
        text = [*prompt, *tokens]
        ids = torch.tensor([text], device=pair.drafter.device)
        with torch.no_grad():
            draft_logits: Any = pair.drafter.model(ids).logits[0, len(prompt) - 1 : -1]
        law = sampling.law(pair.plain_logits(text)[len(prompt) - 1 : -1].double())
        draft = sampling.law(draft_logits.to(law))
        ratio = torch.where(law > 0, law * (law / draft.clamp(min=1e-300)).log2(), 0.0)
        bits += ratio.sum(-1).tolist()
        apart += (0.5 * (law - draft).abs().sum(-1)).tolist()
    return {"kl_bits": float(np.mean(bits)), "total_variation": float(np.mean(apart))}
