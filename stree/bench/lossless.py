"""Whether an output is the target's: token identity, how near a tie two texts part, and a test of sampled text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from scipy.stats import chisquare
from torch import Tensor

from stree.bench.execute import Case, Run, execute
from stree.bench.methods import Method, parse_methods
from stree.bench.pair import Pair
from stree.bench.peers import run_transformers
from stree.bench.records import Record
from stree.sampling import Random
from stree.verify import name_of

__all__ = ["check_method", "compare", "judge", "places_in_distribution", "probs_test", "reason_of"]

(PLAIN,) = parse_methods("plain")
# Two passes of one model over one text differ by up to 1e-4 of the logit scale in float32 (the project's own bar), so
# two logits may change places where they are closer than twice that.  bfloat16 has 8 bits of mantissa.
NEAR_TIE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
BINS = 20
ALPHA = 1e-4  # a run tests some dozen methods, so that a lossless one is called wrong about once in a thousand runs


def check_method(
    pair: Pair,
    method: Method,
    cases: Sequence[Case],
    test_texts: int,
    advance: Callable[..., None] = lambda *_: None,
) -> Record:
    """Run a method before it is timed, and compare its output with the target's.

    Greedy: token identity with transformers' ``generate``, or a near-tie where they part.  MATCH: the same with plain
    sampling of the same seed.  Other sampled text: the same method must be right when greedy, and pass the
    statistical test if ``test_texts`` is not 0.

    Returns:
        status: "ok", "failed", or "unavailable" with the reason; lossless: None where nothing could be checked.
    """
    verdict: Record = {"lossless": None, "verifier": "none"}
    try:
        for case in cases:
            run = execute(pair, method, case)
            verdict = judge(pair, method, case, run, {})
            if verdict["lossless"] is None and not (method.is_peer or method.is_lossy):
                verdict |= _check_sampled(pair, method, case, test_texts, advance)
                verdict |= _claim(verdict, run)
            if verdict["lossless"] is False:
                return {"status": "failed", **verdict}
    except Exception as error:  # whatever a model, a kernel or a library raises: the other methods are still run
        return {"status": "unavailable", "reason": reason_of(error), "lossless": None}
    return {"status": "ok", **verdict}


def judge(pair: Pair, method: Method, case: Case, run: Run, others: dict[str, Run]) -> Record:
    """Compare one run with the target's own text, where a text is prescribed.

    Args:
        pair: the models.
        method: that was run.
        case: of the run.
        run: of the method.
        others: other methods' runs of the same case, by name; a reference that is not among them is made.

    Returns:
        verifier, and lossless: None where the distribution alone is prescribed, or where it is lossy; "claimed",
        as in statistics, where the output is right and a class of another author took part.
    """
    if method.is_lossy:
        return {"verifier": run.stats["verifier"], "lossless": None}
    verifier, found = _verifier_name(method, case.temperature), Record(lossless=None)
    if case.temperature == 0:
        found = _compare_greedy(pair, method, case, run, others)
    elif verifier == "match" and method.name != "plain":
        found = _compare_rows(pair, case, run, others["plain"] if "plain" in others else execute(pair, PLAIN, case))
    return {"verifier": verifier, **found, **_claim(found, run)}


def _claim(found: Record, run: Run) -> Record:
    """Return the word of the statistics for a right output of a class that only claims to be lossless."""
    is_claimed = found["lossless"] is True and run.stats.get("lossless") == "claimed"
    return {"lossless": "claimed"} if is_claimed else {}


def reason_of(error: Exception) -> str:
    """Describe why a method cannot run, with the kind of error where it is not a refusal."""
    return str(error) if isinstance(error, NotImplementedError) else f"{type(error).__name__}: {error}"


def _verifier_name(method: Method, temperature: float) -> str:
    """Name the rule that accepts: greedy, match, or the one asked for; "none" for another library."""
    if method.is_peer:
        return "none"
    if temperature == 0:
        return "greedy"
    return "match" if method.verifier == "auto" and method.is_deterministic else name_of(method.verifier)


def _compare_greedy(pair: Pair, method: Method, case: Case, run: Run, others: dict[str, Run]) -> Record:
    """Compare greedy texts with transformers' own.

    In a batch, plain decoding is compared with transformers' text of each prompt alone, and the others with plain's.
    """
    wanted = others.get("transformers") if len(case.prompts) == 1 else None
    if wanted is None and method.name not in ("plain", "transformers"):
        wanted = others.get("plain")
    return _compare_rows(pair, case, run, wanted)


def _compare_rows(pair: Pair, case: Case, run: Run, wanted: Run | None) -> Record:
    """Compare prompt by prompt with ``wanted``, or with transformers' greedy texts; the worst row is reported."""
    verdict: Record = {}
    for row, (prompt, tokens) in enumerate(zip(case.prompts, run.tokens, strict=True)):
        if wanted is not None:
            text = wanted.tokens[row]
        else:
            text = run_transformers(pair, [prompt], case.new_tokens, 0.0, 0).tokens[0]
        found = compare(pair, case, row, tokens, text)
        if not verdict or not found["identical"]:
            verdict = found
        if not found["lossless"]:
            break
    return verdict


def compare(pair: Pair, case: Case, row: int, tokens: Sequence[int], wanted: Sequence[int]) -> Record:
    """Compare an output with the reference: identical, or how near a tie their first difference is.

    Returns:
        lossless: identical, or apart first at a near-tie; with its place, logit gap and the logits' scale.  The gap of
        sampled tokens is the least change of logits with which one random number draws both.
    """
    if list(tokens) == list(wanted):
        return {"lossless": True, "identical": True}
    place = next((i for i, (a, b) in enumerate(zip(tokens, wanted, strict=False)) if a != b), None)
    if place is None:
        return {"lossless": False, "identical": False, "lengths": [len(tokens), len(wanted)]}
    text = [*case.prompts[row], *wanted[:place]]
    logits = pair.plain_logits(text)[-1].double()
    if case.temperature == 0:
        gap = float(logits[wanted[place]] - logits[tokens[place]])
    else:
        gap = max(_sampled_gap(logits, case, row, len(text), token) for token in (tokens[place], wanted[place]))
    scale = float(logits.abs().max())
    report = {"identical": False, "first_divergence": place, "logit_gap": gap, "logit_scale": scale}
    return {"lossless": abs(gap) <= NEAR_TIE[pair.target.dtype] * scale, **report}


def _sampled_gap(logits: Tensor, case: Case, row: int, position: int, token: int) -> float:
    """Return the least change of differences of float64[vocab] logits with which a random number draws a token.

    A change of g moves a cumulative probability by at most g / (4 * temperature).  The random number is that of plain
    sampling at ``position`` of the text.
    """
    rng = Random(case.seed, torch.tensor([row]), torch.tensor([position]))
    number = float(rng.uniform("target", torch.tensor([0])))
    upper: list[float] = case.sampling.probs(logits[None])[0].cumsum(-1)[: token + 1].tolist()
    lower = upper[-2] if token else 0.0
    return 4 * case.temperature * max(lower - number, number - upper[-1], 0.0)


def _check_sampled(pair: Pair, method: Method, case: Case, test_texts: int, advance: Callable[..., None]) -> Record:
    """Check a method of whose sampled text only the distribution is prescribed."""
    greedy_case = replace(case, temperature=0.0)
    found = _compare_greedy(pair, method, greedy_case, execute(pair, method, greedy_case), {})
    if not found["lossless"]:
        return found
    return {"greedy_identical": True, **(probs_test(pair, method, case, test_texts, advance) if test_texts else {})}


def probs_test(
    pair: Pair, method: Method, case: Case, texts: int, advance: Callable[..., None] = lambda *_: None
) -> Record:
    """Test sampled text against the target's distribution by the chi-square of ``places_in_distribution``.

    Args:
        pair: the models.
        method: that generates.
        case: prompts and temperature; seeds are counted from its own.
        texts: texts a prompt.
        advance: called with 0 and what is done after every text, so that progress is shown.

    Returns:
        lossless: False where chance gives such places less than once in 10,000 times; with p_value and num_tokens.
    """
    rng = np.random.default_rng(case.seed)
    places: list[float] = []
    for number in range(texts):
        one = replace(case, seed=case.seed + number)
        found = places_in_distribution(pair, one, execute(pair, method, one).tokens, rng)
        # The first token is drawn from the prompt's own logits before any tree.
        places += [place for number, place in enumerate(found) if number % case.new_tokens]
        advance(0, f"testing {method.name}, text {number + 1} of {texts}")
    p_value = float(chisquare(np.histogram(places, BINS, (0.0, 1.0))[0]).pvalue)
    return {"lossless": p_value >= ALPHA, "p_value": p_value, "num_tokens": len(places)}


def places_in_distribution(
    pair: Pair, case: Case, outputs: Sequence[Sequence[int]], rng: np.random.Generator
) -> list[float]:
    """Compute the place of each token in the target's distribution of it: the mass of likelier tokens, plus noise.

    Given the text before it, a token drawn from that distribution has a place that is uniform on [0, 1) and independent
    of the places before (the probability integral transform), whatever tree it came from.
    """
    places: list[float] = []
    for prompt, tokens in zip(case.prompts, outputs, strict=True):
        logits = pair.plain_logits([*prompt, *tokens])[len(prompt) - 1 : -1]
        ordered, order = case.sampling.probs(logits.double()).sort(dim=-1, descending=True, stable=True)
        token = torch.tensor(list(tokens), device=order.device)
        rank = (order == token[:, None]).long().argmax(-1, keepdim=True)
        mass = ordered.gather(-1, rank)
        below = ordered.cumsum(-1).gather(-1, rank) - mass
        noise = torch.tensor(rng.random(len(tokens)))
        places += (below + mass * noise.to(mass)[:, None]).squeeze(-1).tolist()
    return places
