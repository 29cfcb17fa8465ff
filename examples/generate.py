"""Generate with a small draft model and compare with plain decoding: the same text, fewer passes of the target."""

import sys
from pathlib import Path

from transformers import AutoTokenizer

import stree

ASSETS = Path(stree.__file__).parent / "assets"  # the bundled pair; any supported checkpoint works the same way
PROMPT = "Question: Tom has 3 apples. He gets 2 more apples each day for 5 days. How many apples does he get?\nAnswer:"


def main(max_new_tokens: int = 96) -> None:
    """Decode greedily with and without a draft model, then sample."""
    target = stree.TreeLM.from_pretrained(ASSETS / "target")
    drafter = stree.drafters.ModelDrafter(stree.TreeLM.from_pretrained(ASSETS / "drafter"))
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "target")
    prompts = tokenizer([PROMPT, "def __init__(self, name):"])["input_ids"]

    trees = stree.generate(target, prompts, drafter, budget=16, max_new_tokens=max_new_tokens)
    plain = stree.generate(target, prompts, stree.drafters.NoDrafter(), max_new_tokens=max_new_tokens)
    assert trees.sequences == plain.sequences  # greedy text is the same, token for token
    print(*tokenizer.batch_decode(trees.sequences), sep="\n\n")
    steps = trees.stats["steps"], plain.stats["steps"]
    print(f"\n{steps[0]} passes of the target instead of {steps[1]}: {trees.stats['tau']:.2f} tokens a step")

    sampling = stree.Sampling(temperature=0.8, top_p=0.95)  # sampled text has exactly the target's distribution
    sampled = stree.generate(target, prompts, drafter, budget=16, sampling=sampling, max_new_tokens=max_new_tokens)
    print(f"sampled: {sampled.stats['tau']:.2f} tokens a step")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
