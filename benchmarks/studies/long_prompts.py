"""Write prompts of given lengths, as suites long-N: passages of held-out books and packages, to continue or summarise.

    python -m benchmarks.studies.long_prompts --target smollm2 --tokens 500,2000 --request --corpus CORPUS --out FOLDER
    stree bench run --target smollm2 --chat --suite long-500=FOLDER/long-500.jsonl,long-2000=FOLDER/long-2000.jsonl ...

CORPUS is a folder of english.jsonl.zst and python_code.jsonl.zst.  English and Python take turns; the passages of all
lengths end at the same places, so that the text to continue is the same.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import command_line
from benchmarks.training.data import read_file
from stree.bench.smollm2 import prepared
from stree.inputs import load_tokenizer, locate

__all__ = ["held_out_tokens", "passages"]

FILES = {"english": "english.jsonl.zst", "python": "python_code.jsonl.zst"}
REQUESTS = {
    "english": "Summarise this passage, quoting its own words.",
    "python": "Explain what this code does, quoting it.",
}


def passages(tokens: Sequence[int], lengths: Sequence[int], count: int) -> list[list[list[int]]]:
    """Cut passages of each length, all of which end at the same ``count`` evenly spaced places.

    Returns:
        A list of ``count`` passages for each length.

    Raises:
        ValueError: the text is shorter than the longest passage.
    """
    longest = max(lengths)
    if len(tokens) < longest:
        raise ValueError(f"a passage of {longest} tokens needs a text of that many, got {len(tokens)}")
    ends = [longest + number * (len(tokens) - longest) // max(count - 1, 1) for number in range(count)]
    return [[list(tokens[end - length : end]) for end in ends] for length in lengths]


def held_out_tokens(target: str, corpus: Path, kind: str) -> list[int]:
    """Tokenize the held-out texts of a kind, one after another, with a target's tokenizer."""
    tokenizer = load_tokenizer(locate(prepared(target), "target"))
    texts = [one.text for one in read_file(corpus / FILES[kind], corpus) if one.held_out]
    return list(tokenizer("\n\n".join(texts), add_special_tokens=False, verbose=False)["input_ids"])


def main() -> None:
    """Write the files."""
    parser = command_line(__doc__, "folder of the files", required=True)
    parser.add_argument("--target", default="bundled", help="whose tokens are counted")
    parser.add_argument("--tokens", default="500,2000", help="lengths of the passages")
    parser.add_argument("--count", type=int, default=6, help="prompts of each length, an even number")
    parser.add_argument("--request", action="store_true", help="ask for a summary; else the passage is continued")
    parser.add_argument("--corpus", type=Path, required=True)
    arguments = parser.parse_args()
    lengths = [int(length) for length in arguments.tokens.split(",")]
    tokenizer = load_tokenizer(locate(prepared(arguments.target), "target"))
    texts: dict[str, list[list[str]]] = {}  # kind -> length -> passages
    for kind in FILES:
        cut = passages(held_out_tokens(arguments.target, arguments.corpus, kind), lengths, arguments.count // 2)
        end = f"\n\n{REQUESTS[kind]}" if arguments.request else ""
        texts[kind] = [[tokenizer.decode(tokens) + end for tokens in same_length] for same_length in cut]
    arguments.out.mkdir(parents=True, exist_ok=True)
    for length, *of_kinds in zip(lengths, *texts.values(), strict=True):
        by_turns = [text for pair in zip(*of_kinds, strict=True) for text in pair]
        lines = "".join(json.dumps({"prompt": text}) + "\n" for text in by_turns)
        (arguments.out / f"long-{length}.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main()
