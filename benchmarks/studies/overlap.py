"""Milliseconds a step with and without drafting while the target verifies, target and draft model on a core each.

Run with ``python -m benchmarks.studies.overlap`` on a machine with two idle cores.  It prints one JSON line a pair,
temperature and growth; calls with and without overlap follow each other.  The bundled pair is what it is.  In the other
pair the draft model is the first quarter of a random target whose other layers add nothing, so that nearly every guess
is right: what overlap gives at best.
"""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from transformers import Mamba2Config, Mamba2ForCausalLM

import stree
from stree.bench.records import environment
from stree.drafters import ModelDrafter
from stree.inputs import load_tokenizer, locate
from stree.sampling import Sampling

BAR = 0.85  # of the step time without overlap, where drafting takes at least a third of it
BUDGETS = {"chain:2": 3, "chain:4": 5, "calibrated": 16}
PROMPTS = (
    "def fibonacci(n):\n    return",
    "Question: Tom has 5 apples and buys 7 more. How many",
    "The river was quiet and she",
)
Pair = tuple[stree.TreeLM, ModelDrafter, list[list[int]]]


def bundled() -> Pair:
    """Load the bundled target and draft model."""
    target, tokenizer = locate("bundled", "target"), load_tokenizer(locate("bundled", "target"))
    drafter = ModelDrafter(stree.TreeLM.from_pretrained(locate("bundled", "drafter")))
    return stree.TreeLM.from_pretrained(target), drafter, [tokenizer(text)["input_ids"] for text in PROMPTS]


def agreeing(hidden_size: int = 1024, num_layers: int = 12) -> Pair:
    """Make a random target and a draft model of a quarter of its layers that says the same."""
    torch.manual_seed(0)
    sizes = {"hidden_size": hidden_size, "num_heads": hidden_size // 32, "head_dim": 64, "state_size": 64}
    config = Mamba2Config(**sizes, num_hidden_layers=num_layers, vocab_size=8192, n_groups=1)
    target = Mamba2ForCausalLM(config).eval()
    config = Mamba2Config(**sizes, num_hidden_layers=num_layers // 4, vocab_size=8192, n_groups=1)
    draft_model = Mamba2ForCausalLM(config).eval()
    draft_model.load_state_dict(target.state_dict(), strict=False)
    for block in target.backbone.layers[num_layers // 4 :]:
        torch.nn.init.zeros_(block.mixer.out_proj.weight)
    return stree.TreeLM(target), ModelDrafter(stree.TreeLM(draft_model)), [[5, 17, 9], [6, 17, 9], [7, 17, 9]]


def measure(pair: Pair, temperature: float, growth: str, rounds: int) -> dict[str, Any]:
    """Decode every prompt with and without overlap, ``rounds`` times; return sums by part and their ratio."""
    lm, drafter, prompts = pair
    sums: dict[bool, dict[str, float]] = {False: defaultdict(float), True: defaultdict(float)}
    for number in range(-1, rounds):  # the round before the first is not counted
        for prompt in prompts:
            texts = []
            for overlap in (False, True):
                start = time.perf_counter()
                out = stree.generate(lm, [prompt], drafter, growth=growth, budget=BUDGETS[growth], overlap=overlap,
                                     verifier="match" if temperature else "auto", sampling=Sampling(temperature),
                                     seed=max(number, 0), max_new_tokens=64, ignore_eos=True)  # fmt: skip
                texts.append(out.sequences)
                if number >= 0:
                    sums[overlap]["s"] += time.perf_counter() - start
                    for name in ("steps", "reused_drafts", "draft_s"):
                        sums[overlap][name] += out.stats[name]
            assert texts[0] == texts[1], "overlap changed a text"
    without, overlapped = sums[False], sums[True]
    times = [1e3 * one["s"] / one["steps"] for one in (without, overlapped)]
    return {
        "step_ms": times[0], "overlapped_step_ms": times[1], "ratio": times[1] / times[0],
        "drafting": without["draft_s"] / without["s"], "reused": overlapped["reused_drafts"] / overlapped["steps"],
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every pair, temperature and growth."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args(arguments).rounds
    torch.set_num_threads(1)
    for name, pair in (("agreeing", agreeing()), ("bundled", bundled())):
        for temperature in (0.0, 0.8) if name == "bundled" else (0.0,):
            for growth in BUDGETS:
                record = {"bench": "overlap", "pair": name, "temperature": temperature, "growth": growth}
                record |= measure(pair, temperature, growth, rounds)
                print(json.dumps(record | {"bar": BAR, "env": environment(None)}), flush=True)


if __name__ == "__main__":
    main()
