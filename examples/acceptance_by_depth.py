"""Plot acceptance by depth: of the steps whose path reached a depth, how many accepted a node at the next one."""

import sys
from pathlib import Path

from transformers import AutoTokenizer

import stree

ASSETS = Path(stree.__file__).parent / "assets"
PROMPTS = [
    "def __init__(self, name):",
    "Question: Tom has 3 apples and gets 2 more. How many has he?\nAnswer:",
]


def main(max_new_tokens: int = 96) -> None:
    """Sample two texts with a draft model, and draw a bar for each depth."""
    target = stree.TreeLM.from_pretrained(ASSETS / "target")
    drafter = stree.drafters.ModelDrafter(stree.TreeLM.from_pretrained(ASSETS / "drafter"))
    prompts = AutoTokenizer.from_pretrained(ASSETS / "target")(PROMPTS)["input_ids"]
    out = stree.generate(
        target, prompts, drafter, budget=16, sampling=stree.Sampling(0.8), max_new_tokens=max_new_tokens,
        return_steps=True,
    )  # fmt: skip
    steps = [step for text in out.steps for step in text]
    for depth in range(max(step.num_accepted for step in steps)):
        reached = [step for step in steps if step.num_accepted >= depth]  # also where that node was a leaf
        accepted = [step for step in reached if step.num_accepted > depth]
        share = len(accepted) / len(reached)
        chance = [step.draft_probs[depth] for step in accepted]  # that the draft model gave to the accepted token
        mean = sum(chance) / len(chance)
        print(f"depth {depth + 1} {'#' * round(40 * share):40} {share:4.0%} of {len(reached)}, drafted at {mean:.2f}")
    # A plot: d = out.stats["acceptance_by_depth"]; plt.bar(range(1, len(d) + 1), d); plt.savefig("depth.svg")
    for row, text in zip(out.stats["rows"], PROMPTS, strict=True):
        print(f"tau {row['tau']:.2f} after {text!r}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
