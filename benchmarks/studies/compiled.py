"""Tokens a second with the scoring of trees compiled, over without: ``--compile`` of the commands, in one run.

    python -m benchmarks.studies.compiled --suite humaneval=HumanEval.jsonl,gsm8k=test.jsonl,mt_bench=question.jsonl

Calls with and without follow each other, after a pass over all prompts that compiles and is not counted.  Prints a JSON
line for each method and temperature, with a paired bootstrap interval over prompts, and appends it to ``--out``.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from stree.bench.execute import Case, execute
from stree.bench.methods import Method, parse_methods
from stree.bench.pair import Pair
from stree.bench.plan import read_suites
from stree.bench.prompts import parse_suites
from stree.bench.records import append, environment
from stree.bench.summary import sum_ratio

BAR = 1.5


def measure(
    pairs: dict[bool, Pair], method: Method, prompts: list[list[int]], new_tokens: int, temperature: float
) -> Any:
    """Time every prompt with and without compilation; return seconds, and the ratio of speeds with its interval."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    num_same = 0
    for number, prompt in enumerate([*prompts, *prompts], 1 - len(prompts)):
        texts = []
        for is_compiled in (False, True) if number % 2 else (True, False):
            run = execute(pairs[is_compiled], method, Case((tuple(prompt),), new_tokens, temperature))
            texts.append(run.tokens)
            if number > 0:  # the first pass compiles
                seconds[is_compiled].append(run.seconds)
        num_same += number > 0 and texts[0] == texts[1]
    eager, compiled = seconds[False], seconds[True]
    speeds = {name: len(prompts) * new_tokens / sum(s) for name, s in (("eager", eager), ("compiled", compiled))}
    ratio = sum_ratio(eager, compiled)
    return {"tokens_per_s": speeds, "compiled_over_eager": ratio, "same_texts": num_same, "prompts": len(prompts)}


def main() -> None:
    """Measure every method and temperature."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", required=True)
    parser.add_argument("--limit", type=int, default=4, help="prompts of each suite")
    parser.add_argument("--target", default="bundled")
    parser.add_argument("--drafter", default=None)
    parser.add_argument("--methods", default="plain,calibrated:16")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    pairs = {is_compiled: Pair.load(options.target, options.drafter, device="cpu") for is_compiled in (False, True)}
    pairs[True].compile()
    suites = read_suites(parse_suites(options.suite), options.limit)
    prompts = [pairs[True].encode(prompt.turns[:1]) for suite in suites for prompt in suite.prompts]
    for method in parse_methods(options.methods):
        for temperature in (0.0, 0.8):
            record = {"bench": "compiled", "target": options.target, "method": method.name, "temperature": temperature}
            record |= measure(pairs, method, prompts, options.max_new_tokens, temperature)
            record |= {"threads": options.threads, "bar": BAR, "env": environment()}
            print(json.dumps(record), flush=True)
            if options.out is not None:
                append(options.out, [record])


if __name__ == "__main__":
    main()
