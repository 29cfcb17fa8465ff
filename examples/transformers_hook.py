"""Trees inside transformers' own generate(): the same call, the same text, fewer passes of the model."""

import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import stree

ASSETS = Path(stree.__file__).parent / "assets"


def main(max_new_tokens: int = 64) -> None:
    """Generate greedily with and without trees, then sample."""
    model = AutoModelForCausalLM.from_pretrained(ASSETS / "target", dtype="float32")
    small = AutoModelForCausalLM.from_pretrained(ASSETS / "drafter", dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "target", padding_side="left")
    inputs = tokenizer(
        ["def __init__(self, name):", "Question: Tom has 3 apples and 2 pears."], return_tensors="pt", padding=True
    )

    options = {"max_new_tokens": max_new_tokens, "do_sample": False, "repetition_penalty": 1.1}
    plain = model.generate(**inputs, **options)
    trees = model.generate(**inputs, **options, custom_generate=stree.custom_generate, drafter=small, budget=16)
    assert trees.equal(plain)  # processors such as the penalty act on every node of a tree
    print(*tokenizer.batch_decode(trees, skip_special_tokens=True), sep="\n\n")

    options = {"max_new_tokens": max_new_tokens, "do_sample": True, "temperature": 0.8, "top_p": 0.95}
    sampled = model.generate(**inputs, **options, custom_generate=stree.custom_generate, drafter="suffix", seed=1)
    print(*tokenizer.batch_decode(sampled, skip_special_tokens=True), sep="\n\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
