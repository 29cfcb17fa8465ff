"""``stree bench fit-rates``: acceptance rates by sibling rank of a pair, for Sequoia's trees."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from stree.cli.bench_options import add_bench_command, add_models, load_pair, numbers_of

__all__ = ["add_fit_rates"]


def add_fit_rates(bench: Any) -> None:
    """Register the command with the subparsers object of ``stree bench``."""
    command = add_bench_command(
        bench, "fit-rates", _fit_rates, "measure the acceptance rates that Sequoia's trees are made from"
    )
    add_models(command)
    command.add_argument("--suite", required=True, help="NAME=FILE,... as of stree bench run")
    command.add_argument(
        "--skip", type=int, default=32, help="first prompts of each suite, which are left to measure on"
    )
    command.add_argument("--limit", type=int, default=16, help="prompts of each suite")
    command.add_argument("--temperature", default="0,0.8", help="one or several; 0 is greedy")
    command.add_argument("--ranks", type=int, default=12, help="most children of a node")
    command.add_argument("--max-new-tokens", type=int, default=64, help="contexts of every prompt")
    command.add_argument("--seed", type=int, default=0, help="of the random numbers")
    command.add_argument("--chat", action="store_true", help="put prompts through the tokenizer's chat template")
    command.add_argument("--out", type=Path, required=True, help="JSON file of the rates")


def _fit_rates(arguments: argparse.Namespace) -> int:
    """Run ``stree bench fit-rates``."""
    from stree.bench.plan import read_suites
    from stree.bench.prompts import parse_suites
    from stree.bench.rates import fit_rates
    from stree.bench.records import environment
    from stree.checks import check_counts
    from stree.files import check_file, replacing
    from stree.sampling import Sampling

    check_counts(limit=arguments.limit, max_new_tokens=arguments.max_new_tokens)
    check_counts(ranks=arguments.ranks, below=257)  # each takes as long, and later ones are hardly ever accepted
    if arguments.skip < 0:
        raise ValueError(f"--skip must not be negative, got {arguments.skip}")
    kinds = [Sampling(temperature) for temperature in numbers_of("--temperature", arguments.temperature, float)]
    check_file(arguments.out)
    suites = read_suites(parse_suites(arguments.suite), arguments.skip + arguments.limit)
    prompts = [prompt.turns[:1] for suite in suites for prompt in suite.prompts[arguments.skip :]]
    if not prompts:
        raise ValueError(f"no suite has prompts behind the first {arguments.skip}; give another --skip")
    pair = load_pair(arguments)
    encoded = [pair.encode(turns, chat=arguments.chat) for turns in prompts]
    most = min((lm.max_length or sys.maxsize for lm in (pair.target, pair.drafter) if lm), default=sys.maxsize)
    fitting = [tokens for tokens in encoded if len(tokens) + arguments.max_new_tokens <= most]
    if len(fitting) < len(encoded):
        left_out = f"a prompt and {arguments.max_new_tokens} new tokens exceed {most}"
        if not fitting:
            raise ValueError(f"no prompt fits: {left_out}")
        print(f"{len(encoded) - len(fitting)} of {len(encoded)} prompts are left out: {left_out}", file=sys.stderr)
    found = fit_rates(
        pair, fitting, kinds, ranks=arguments.ranks, new_tokens=arguments.max_new_tokens, seed=arguments.seed
    )
    names = dict(zip(("target", "drafter", "weights"), (*pair.names, pair.weights), strict=True))
    given = {name: getattr(arguments, name) for name in ("skip", "limit", "max_new_tokens", "seed", "chat")}
    suites_of = {suite.name: suite.digest for suite in suites}
    record = {"bench": "fit-rates", **names, "dtype": pair.dtype, "suites": suites_of, **given, **found}
    with replacing(arguments.out) as beside:
        beside.write_text(
            json.dumps(record | {"env": environment(pair.target.device)}, indent=1) + "\n", encoding="utf-8"
        )
    for temperature, rates in found["rates"].items():
        print(f"T {float(temperature):g}: rates={'/'.join(f'{rate:g}' for rate in rates)}")
    return 0
