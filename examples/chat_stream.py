"""A conversation whose answers are printed as they are generated.

The bundled target has no chat template, so its turns are "Question: ... Answer: ...".  Of a model that has one, make
turns with ``tokenizer.apply_chat_template``.
"""

import sys
from pathlib import Path

from transformers import AutoTokenizer, TextStreamer

import stree

ASSETS = Path(stree.__file__).parent / "assets"
QUESTIONS = [
    "Tom has 3 apples. He gets 2 more apples each day for 5 days. How many apples does he get?",
    "Tom has 3 apples. He buys 4 bags with 5 apples each. How many apples does he have now?",
]


def main(max_new_tokens: int = 96) -> None:
    """Ask the questions one after the other; every answer sees the turns before it."""
    target = stree.TreeLM.from_pretrained(ASSETS / "target")
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "target")
    model = stree.drafters.ModelDrafter(stree.TreeLM.from_pretrained(ASSETS / "drafter"))
    drafter = stree.drafters.FusedDrafter(model, stree.drafters.SuffixDrafter())  # also drafts from earlier turns
    turns: list[int] = []  # tokens of the conversation so far
    for question in QUESTIONS:
        turns += tokenizer(f"Question: {question}\nAnswer:")["input_ids"]
        print(f"\n> {question}")
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        out = stree.generate(target, [turns], drafter, max_new_tokens=max_new_tokens, streamer=streamer)
        turns = out.sequences[0]


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
