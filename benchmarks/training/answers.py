"""Write a target's own answers to requests in its chat template, as text to distill a drafter on.

    python -m benchmarks.training.answers --target smollm2 --data DATA --minutes 4 --out runs/smollm2-answers.jsonl
    stree distill --target FOLDER --text runs/smollm2-answers.jsonl ...

DATA holds gsm8k/train.jsonl, corpus/english.jsonl.zst and corpus/python_code.jsonl.zst.  Requests are questions of
GSM8K's training set, and passages of books and code to summarise, explain, continue or test; none is part of a suite,
and no passage is held out.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from benchmarks.report import command_line
from benchmarks.training.data import read_file
from stree import Sampling, generate
from stree.bench.pair import Pair
from stree.drafters import NoDrafter

__all__ = ["requests"]

CHARACTERS = 600  # of a passage
DOCUMENTS = 400  # read of each corpus
ROWS = 16  # requests that run together
NEW_TOKENS = 192
TEMPERATURES = (0.0, 0.8)  # by turns
ABOUT = {
    "english": ("Summarise this passage.", "Continue this story.", "Ask three questions about this text, and answer."),
    "python": ("Explain what this code does.", "Write a test for this code.", "Complete this code."),
}


def requests(data: Path, seed: int = 0) -> Iterator[str]:
    """Yield requests without end: half of them questions, the others about passages."""
    rng = random.Random(seed)
    files = [data / "corpus" / name for name in ("english.jsonl.zst", "python_code.jsonl.zst")]
    passages = [one for file in files for one in islice(read_file(file, data), DOCUMENTS) if not one.held_out]
    lines = (data / "gsm8k" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    while True:
        yield json.loads(rng.choice(lines))["question"]
        one = rng.choice(passages)
        start = rng.randrange(max(len(one.text) - CHARACTERS, 1))
        yield f"{rng.choice(ABOUT[one.kind])}\n\n{one.text[start : start + CHARACTERS]}"


def main() -> None:
    """Write the file, one JSON line an answer, request and template included."""
    parser = command_line(__doc__, "file of JSON lines, replaced", required=True)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=4.0)
    arguments = parser.parse_args()
    pair = Pair.load(arguments.target, "none", dtype="bfloat16")
    end, wanted, number = time.monotonic() + 60 * arguments.minutes, requests(arguments.data), 0
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with arguments.out.open("w", encoding="utf-8") as file:
        while time.monotonic() < end:
            prompts = [pair.encode([text], chat=True) for text in islice(wanted, ROWS)]
            sampling = Sampling(TEMPERATURES[number % len(TEMPERATURES)])
            out = generate(
                pair.target, prompts, NoDrafter(), budget=1, sampling=sampling, max_new_tokens=NEW_TOKENS, seed=number
            )
            file.writelines(json.dumps({"text": pair.tokenizer.decode(text)}) + "\n" for text in out.sequences)
            file.flush()
            number += 1


if __name__ == "__main__":
    main()
