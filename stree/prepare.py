"""Commands that prepare what drafters use: ``stree datastore build`` and ``stree trim-vocab``.

Nothing heavy is imported before a command runs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

__all__ = ["add_prepare", "documents", "tokenizer_fingerprint"]


def add_prepare(commands: Any, assets: Path) -> None:
    """Register the commands with an argparse subparsers object; ``assets`` holds the bundled pair."""
    store = commands.add_parser("datastore", help="texts to draft from", description="Texts to draft from.")
    actions = store.add_subparsers(required=True, metavar="COMMAND")
    build = _command(actions, "build", "index text files, so that 'stree generate --datastore' drafts from them")
    build.set_defaults(run=_build, assets=assets)
    build.add_argument(
        "files", nargs="+", type=Path, metavar="FILES", help="text files, JSON lines, or folders of them"
    )
    build.add_argument("--target", default="bundled", help="whose tokenizer: 'bundled', a folder, or a hub id")
    build.add_argument("--max-tokens", type=int, default=1 << 26, help="bound of the store; 8 bytes a token")
    build.add_argument("--out", type=Path, required=True, help="file to write")

    trim = _command(commands, "trim-vocab", "list the tokens that a drafter's head keeps: the most frequent ones")
    trim.set_defaults(run=_trim, assets=assets)
    trim.add_argument("--target", default="bundled", help="'bundled', a folder, or a hub id")
    source = trim.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", nargs="+", type=Path, help="count in text files, JSON lines, or folders of them")
    source.add_argument("--prompts", nargs="+", type=Path, help="count in what the target generates from these")
    trim.add_argument("--keep", type=int, required=True, help="tokens to keep, stop tokens included")
    trim.add_argument("--max-new-tokens", type=int, default=128, help="tokens generated for a prompt")
    trim.add_argument("--temperature", type=float, default=1.0, help="of what is generated")
    trim.add_argument("--seed", type=int, default=0, help="of what is generated")
    trim.add_argument("--out", type=Path, required=True, help="file to write")


def _command(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    """Add one command."""
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text[0].upper() + text[1:] + ".",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )  # fmt: skip
    return command


def documents(paths: Sequence[Path]) -> Iterator[str]:
    """Read texts: a file is one, a line of a .jsonl file is one (its ``text`` or ``prompt``), a folder all its files.

    Raises:
        ValueError: a path that is not there, a file that is no text, or a line without a text; the message names it.
    """
    for path in paths:
        if not path.exists():
            raise ValueError(f"there is no file or folder {path}")
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if not file.is_file():
                continue
            try:
                text = file.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{file} is no UTF-8 text: {error}") from error
            if file.suffix == ".jsonl":
                yield from _lines(file, text)
            elif text:
                yield text


def _lines(file: Path, text: str) -> Iterator[str]:
    """Read the texts of JSON lines."""
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number} of {file} is not JSON: {error}") from error
        found = record.get("text", record.get("prompt")) if isinstance(record, dict) else None
        if not isinstance(found, str):
            raise ValueError(f"line {number} of {file} must have a text or prompt that is a string")
        yield found


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Name a tokenizer by what its tokens are, so that another one's datastore is noticed."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(vocabulary.encode()).hexdigest()[:16]


def _target_of(arguments: argparse.Namespace) -> str:
    """Turn 'bundled' into its folder."""
    return str(arguments.assets / "target") if arguments.target == "bundled" else arguments.target


def _build(arguments: argparse.Namespace) -> int:
    """Run ``stree datastore build``."""
    from rich.console import Console
    from rich.progress import track
    from transformers import AutoTokenizer

    from stree.retrieval import Datastore

    texts = list(documents(arguments.files))
    if not texts:
        raise ValueError(f"there is no text in {', '.join(map(str, arguments.files))}")
    tokenizer = AutoTokenizer.from_pretrained(_target_of(arguments))
    shown = track(texts, "tokenizing", console=Console(stderr=True), transient=True)
    store = Datastore.build(
        (tokenizer(text, verbose=False)["input_ids"] for text in shown), len(tokenizer),
        tokenizer=tokenizer_fingerprint(tokenizer), max_tokens=arguments.max_tokens,
    )  # fmt: skip
    store.save(arguments.out)
    print(f"{arguments.out}: {len(texts)} texts, {store.num_tokens} tokens, {arguments.out.stat().st_size} bytes")
    return 0


def _trim(arguments: argparse.Namespace) -> int:
    """Run ``stree trim-vocab``."""
    from transformers import AutoConfig, AutoTokenizer

    from stree.vocabulary import most_frequent, save_vocabulary

    name = _target_of(arguments)
    tokenizer, config = AutoTokenizer.from_pretrained(name), AutoConfig.from_pretrained(name)
    stop = config.eos_token_id
    always = stop if isinstance(stop, list) else [] if stop is None else [stop]
    texts = [tokenizer(text, verbose=False)["input_ids"] for text in documents(arguments.text or arguments.prompts)]
    if arguments.prompts:
        texts = _generated(arguments, name, texts, always)
    kept = most_frequent(texts, config.vocab_size, arguments.keep, always)
    known, counted = set(kept), sum(map(len, texts))
    share = sum(token in known for text in texts for token in text) / max(counted, 1)
    save_vocabulary(arguments.out, kept, config.vocab_size)
    print(f"{arguments.out}: {len(kept)} of {config.vocab_size} tokens, {share:.1%} of the {counted} tokens counted")
    return 0


def _generated(
    arguments: argparse.Namespace, name: str, prompts: list[list[int]], stop: Sequence[int]
) -> list[list[int]]:
    """Let the target continue prompts; return what it wrote."""
    from rich.console import Console
    from rich.progress import track

    from stree.generation import generate
    from stree.models.tree_lm import TreeLM
    from stree.sampling import Sampling

    lm = TreeLM.from_pretrained(name)
    texts = []
    for number, prompt in enumerate(track(prompts, "generating", console=Console(stderr=True), transient=True)):
        out = generate(
            lm, [prompt], sampling=Sampling(arguments.temperature), max_new_tokens=arguments.max_new_tokens,
            stop_token_ids=stop, seed=arguments.seed + number,
        )  # fmt: skip
        texts.append(out.sequences[0][len(prompt) :])
    return texts
