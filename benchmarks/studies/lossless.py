"""Measure whether sampled texts have the target's distribution: three tokens through ``stree.generate``, by chi-square.

    python -m benchmarks.studies.lossless --out benchmarks/results/lossless

runs every growth with every verifier at two temperatures on a tiny hybrid target and writes a record of each to
``lossless.jsonl``: growth, verifier, temperature, samples, p-value.  The exact distribution is enumerated by
transformers' forwards of whole texts.  The text is a prompt, one token from prefill and the three that are counted, so
that tokens of a step, the one after them and the next step's take part.  Each record has a control: the p-value of the
same counts against the distribution at another temperature, which must be tiny.  What is recorded already is not run
again.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from helpers.tiny_models import fresh_logits, patched, tiny_model
from scipy import stats
from torch import Tensor

import stree
from benchmarks.report import command_line
from stree import growth as growths
from stree.bench.records import append, read_lines, write
from stree.drafters import Drafter, FusedDrafter, ModelDrafter, SuffixDrafter
from stree.growth import Growth
from stree.models.tree_lm import TreeLM
from stree.sampling import Sampling
from stree.verify import VERIFIERS

ALPHA = 1e-6  # false alarms a test; seeds are fixed, so it passes always or never
SAMPLES = 70_000
BATCH = 5_000
VOCAB = 4
COUNTED = 3  # consecutive tokens, after the one that prefill gives
PROMPT = [1, 2]
TEMPERATURES = (0.6, 1.0)
RULES = [name for name in VERIFIERS if name != "auto"]

# drafter, growth and budget of every way to draft
WAYS: dict[str, tuple[str, Growth | None, int]] = {
    "chain": ("model", growths.Chain(2), 3),
    "static": ("model", growths.Static([2, 2]), 7),
    "layers": ("model", growths.DySpec(depth=2, ranks=3), 6),
    "heap": ("model", growths.DySpec(form="heap"), 4),
    "rsdc": ("model", growths.RSDC([2, 1]), 5),
    "sequoia": ("model", growths.Sequoia(depth=2), 6),
    "calibrated": ("model", growths.Calibrated(depth=2), 6),
    "specinfer": ("model", growths.SpecInfer([2, 1]), 5),
    "rsds": ("model", growths.RSDS(2, 2), 5),
    "opt-tree": ("model", growths.OptTree(depth=2, least_gain=0.1), 6),
    "eagle2": ("model", growths.Eagle2(depth=2, beam=2), 6),
    "chain-sure": ("model", growths.Chain(2, stop=growths.Confidence(least_prob=0.5)), 3),
    "depth-stop": ("model", growths.DepthStop(growths.DySpec(depth=2, ranks=3), threshold=-0.7, layers=None), 6),
    "decision-stop": ("model", growths.DecisionStop(growths.Calibrated(depth=2)), 6),
    "suffix": ("suffix", None, 6),
    "fused": ("fused", growths.DySpec(depth=2), 6),
}


@cache
def target_model() -> Any:
    """Make the target, a hybrid of two layers."""
    sizes: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 16}
    layers: dict[str, Any] = {"num_hidden_layers": 2, "attn_layer_indices": [1], "mamba_chunk_size": 2}
    return tiny_model("bamba", vocab_size=VOCAB, hidden_size=16, **sizes, **heads, **layers)


@cache
def models() -> tuple[TreeLM, TreeLM]:
    """The target and the drafter."""
    sizes: dict[str, Any] = {"num_heads": 4, "head_dim": 8, "state_size": 8, "n_groups": 1}
    layers: dict[str, Any] = {"num_hidden_layers": 1, "chunk_size": 2}
    drafter = tiny_model("mamba2", seed=1, vocab_size=VOCAB, hidden_size=16, **sizes, **layers)
    return patched(target_model()), TreeLM(drafter)


@cache
def exact_probs(sampling: Sampling) -> Tensor:
    """Enumerate the distribution of the counted tokens by fresh forwards: float64[VOCAB ** COUNTED]."""
    joint = torch.ones(1, dtype=torch.float64)
    for size in range(COUNTED + 1):
        texts = [[*PROMPT, *text] for text in itertools.product(range(VOCAB), repeat=size)]
        probs = [sampling.probs(fresh_logits(target_model(), text)[-1].double()) for text in texts]
        joint = (joint[:, None] * torch.stack(probs)).flatten()
    return joint.view(VOCAB, -1).sum(0)


def p_value(counts: Tensor, probs: Tensor) -> float:
    """Test counts against a distribution by chi-square; cells of less than five expected samples are put together."""
    if int(counts[probs == 0].sum()):
        return 0.0  # a text of probability zero was sampled
    expected = probs * counts.sum()
    small = expected < 5
    observed = torch.cat([counts[~small].double(), counts[small].sum()[None]])
    expected = torch.cat([expected[~small], expected[small].sum()[None]])
    kept = expected > 0
    return float(stats.chisquare(observed[kept].numpy(), expected[kept].numpy()).pvalue)


def policy(name: str) -> tuple[Drafter, Growth | None, int]:
    """Drafter, growth and budget of a way to draft."""
    kind, growth, budget = WAYS[name]
    model = ModelDrafter(models()[1])
    drafters = {"model": model, "suffix": SuffixDrafter(), "fused": FusedDrafter(model, SuffixDrafter())}
    return drafters[kind], growth, budget


def sampled_counts(
    drafter: Drafter | None,
    growth: Growth | None,
    budget: int,
    verifier: str,
    sampling: Sampling,
    samples: int = SAMPLES,
) -> tuple[Tensor, list[dict[str, Any]]]:
    """Generate many texts and count the tokens after prefill's: int64[VOCAB ** COUNTED], and the statistics."""
    counts = torch.zeros(VOCAB**COUNTED, dtype=torch.long)
    reports = []
    options: dict[str, Any] = {"growth": growth, "budget": budget, "verifier": verifier, "sampling": sampling}
    options["max_new_tokens"] = COUNTED + 1
    for seed in range(samples // BATCH):
        out = stree.generate(models()[0], [PROMPT] * BATCH, drafter, seed=seed, **options)
        tokens = torch.tensor(out.sequences)[:, len(PROMPT) + 1 :]
        numbers = (tokens * VOCAB ** torch.arange(COUNTED - 1, -1, -1)).sum(1)
        counts += torch.bincount(numbers, minlength=len(counts))
        reports.append(out.stats)
    return counts, reports


def pairs() -> Iterator[tuple[str, str]]:
    """List every way to draft with every verifier that takes its trees."""
    for name, verifier in itertools.product(WAYS, RULES):
        if verifier != "block" or name.startswith("chain"):
            yield name, verifier


def record(name: str, verifier: str, temperature: float, samples: int) -> dict[str, Any]:
    """Measure one pair at one temperature."""
    drafter, growth, budget = policy(name)
    counts, reports = sampled_counts(drafter, growth, budget, verifier, Sampling(temperature), samples)
    another = exact_probs(Sampling(1.25 * temperature))
    return {
        "name": name,
        "growth": str(growth),
        "drafter": type(drafter).__name__,
        "budget": budget,
        "verifier": verifier,
        "temperature": temperature,
        "samples": int(counts.sum()),
        "tau": sum(report["tau"] for report in reports) / len(reports),
        "p_value": p_value(counts, exact_probs(Sampling(temperature))),
        "control_p_value": p_value(counts, another),
    }


def main() -> None:
    """Measure every pair that is not recorded yet."""
    parser = command_line(__doc__, "folder of lossless.jsonl", required=True)
    parser.add_argument("--samples", type=int, default=SAMPLES, help=f"texts a test, a multiple of {BATCH}")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "lossless.jsonl"
    known = read_lines(path)
    write(path, known)  # without a line that was cut off
    done = {(one["name"], one["verifier"], one["temperature"], one["samples"]) for one in known}
    for (name, verifier), temperature in itertools.product(pairs(), TEMPERATURES):
        if (name, verifier, temperature, arguments.samples) in done:
            continue
        known.append(record(name, verifier, temperature, arguments.samples))
        append(path, known[-1:])
        print(f"{name:12} {verifier:10} T {temperature}  p {known[-1]['p_value']:.3g}", flush=True)
    failed = [one for one in known if one["p_value"] < ALPHA or one["control_p_value"] > ALPHA]
    print(f"{len(known)} tests, least p-value {min(one['p_value'] for one in known):.2g}, {len(failed)} failed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
