"""Checks of a method: before anything is timed, and of every timed output that can be checked token for token."""

from __future__ import annotations

from collections.abc import Sequence

from stree.bench.execute import Case, Run, execute
from stree.bench.methods import Method, parse_methods
from stree.bench.pair import Pair
from stree.bench.peers import run_transformers
from stree.bench.records import Record
from stree.bench.verdict import compare, is_coupled, law_test, verifier_name

__all__ = ["check_method", "judge", "reason_of"]

(PLAIN,) = parse_methods("plain")


def check_method(pair: Pair, method: Method, cases: Sequence[Case], law_texts: int) -> Record:
    """Run a method and hold its output against the target's.

    Greedy: token identity with transformers' ``generate``, or a near-tie where they part.  MATCH: the text of plain
    sampling with the same seed.  Laws: the same method must be right when greedy, and pass the statistical test if that
    is asked for.

    Returns:
        status: "ok", "failed" or "unavailable" with the reason; lossless: None where nothing could be checked.
    """
    verdict: Record = {"lossless": None, "verifier": "none"}
    try:
        for case in cases:
            run = execute(pair, method, case)
            if method.is_lossy:
                return {"status": "ok", "lossless": None, "verifier": run.stats["verifier"]}
            verdict = {"verifier": verifier_name(method, case.temperature, run)}
            verdict |= _verdict(pair, method, case, run, None)
            if verdict["lossless"] is None and not method.is_peer:
                verdict |= _sampled(pair, method, case, law_texts)
            if verdict["lossless"] is False:
                return {"status": "failed", **verdict}
    except Exception as error:  # whatever a model, a kernel or a library raises: the others go on
        return {"status": "unavailable", "reason": reason_of(error), "lossless": None}
    return {"status": "ok", **verdict}


def _sampled(pair: Pair, method: Method, case: Case, law_texts: int) -> Record:
    """Check a method whose sampled text is bound by its law only."""
    twin = Case(case.prompts, case.new_tokens, 0.0, case.seed)
    found = _greedy(pair, twin, execute(pair, method, twin).tokens, None)
    if not found["lossless"]:
        return found
    return {"greedy_twin": True, **(law_test(pair, method, case, law_texts) if law_texts else {})}


def reason_of(error: Exception) -> str:
    """Say why something cannot run; the kind of error matters where it is not a refusal."""
    return str(error) if isinstance(error, NotImplementedError) else f"{type(error).__name__}: {error}"


def judge(pair: Pair, method: Method, case: Case, runs: Sequence[Run], others: dict[str, list[Run]]) -> Record:
    """Check every timed run of a method that can be checked.

    Args:
        pair: the models.
        method: that was run.
        case: of the first run; the seeds of the others count on.
        runs: of the method.
        others: all methods' runs of the same prompts, by name.
    """
    if method.is_lossy:
        return {"verifier": runs[0].stats["verifier"], "lossless": None}
    verdict: Record = {"verifier": verifier_name(method, case.temperature, runs[0])}
    for repeat, run in enumerate(runs):
        one = Case(case.prompts, case.new_tokens, case.temperature, case.seed + repeat)
        known = _reference(method, case, others)
        verdict |= _verdict(pair, method, one, run, known[repeat].tokens if known else None)
        if verdict["lossless"] is False:
            break
    return verdict


def _reference(method: Method, case: Case, others: dict[str, list[Run]]) -> list[Run] | None:
    """Find runs to compare with; None where the reference is still to be made.

    A single prompt is compared with transformers' own run; a batch of greedy ones with plain decoding's, which itself
    is compared with transformers' text of each prompt alone.
    """
    if case.temperature == 0 and len(case.prompts) == 1 and "transformers" in others:
        return others["transformers"]
    is_plain = case.temperature == 0 and method.name in ("plain", "transformers")
    return None if is_plain else others.get("plain")


def _verdict(pair: Pair, method: Method, case: Case, run: Run, wanted: list[list[int]] | None) -> Record:
    """Compare one run with the reference, which is made where it is not at hand."""
    is_reference = method.name == "plain" and case.temperature > 0  # only its law can be tested
    if is_reference or not is_coupled(verifier_name(method, case.temperature, run)):
        if method.is_peer and case.temperature == 0:
            return _greedy(pair, case, run.tokens, wanted)
        return {"lossless": None}
    if case.temperature == 0:
        return _greedy(pair, case, run.tokens, wanted)
    if wanted is None:
        wanted = execute(pair, PLAIN, case).tokens
    same = run.tokens == wanted
    return {"lossless": same, "identical": same}


def _greedy(pair: Pair, case: Case, outputs: Sequence[list[int]], wanted: list[list[int]] | None) -> Record:
    """Compare with transformers' own text, prompt by prompt; the worst is reported."""
    verdict: Record = {}
    for row, (prompt, tokens) in enumerate(zip(case.prompts, outputs, strict=True)):
        known = wanted[row] if wanted is not None else run_transformers(pair, [prompt], case.new_tokens, 0.0, 0)[0][0]
        found = compare(pair, prompt, tokens, known)
        if not verdict or not found["identical"]:
            verdict = found
        if not found["lossless"]:
            break
    return verdict
