"""Inputs of commands and benches: text files, tokenizers, and the folder of the bundled pair."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

__all__ = [
    "ASSETS",
    "documents",
    "encode_turn",
    "load_tokenizer",
    "locate",
    "nonempty_documents",
    "stop_tokens",
    "tokenizer_fingerprint",
]

ASSETS = Path(__file__).resolve().parent / "assets"


def locate(name: str, role: str) -> str:
    """Turn 'bundled' into the folder of the bundled target or drafter, 'bundled-mtp' into that of its MTP head.

    Raises:
        ValueError: a path, which no id of the hub is, where nothing is.
    """
    bundled = {"bundled": role, "bundled-mtp": "mtp"}
    if name.startswith(("/", ".", "~")) and not Path(name).exists():
        raise ValueError(f"the {role} must be a folder or a hub id OWNER/NAME, and there is no folder {name}")
    return str(ASSETS / bundled[name]) if name in bundled else name


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> Any:
    """Load a tokenizer; a native mamba-ssm checkpoint has none of its own.

    Raises:
        ValueError: none there, or one that knows no words.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:  # a damaged file or config raises whatever it meets in transformers
        raise ValueError(f"no tokenizer that transformers can read at {name!r}; name one by --tokenizer") from error
    if tokenizer.get_vocab().keys() == tokenizer.get_added_vocab().keys():  # made by transformers for want of one
        raise ValueError(f"the tokenizer at {name!r} knows no words; name one by --tokenizer")
    return tokenizer


def stop_tokens(lm: Any, tokenizer: Any) -> list[int]:
    """List the tokens that end an answer: the model's own, and the tokenizer's, with which chat templates end a turn.

    A generation config may lack the latter; transformers' ``generate``, and so ``stree.generate``, does not read it.
    """
    own = getattr(tokenizer, "eos_token_id", None)
    return sorted({*getattr(lm, "eos_token_ids", ()), *([] if own is None else [own])})


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Name a tokenizer by what its tokens are, so that another one's datastore is noticed."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(vocabulary.encode()).hexdigest()[:16]


def documents(paths: Sequence[Path], without: Path | None = None) -> Iterator[str]:
    """Read texts: a file is one, a line of a .jsonl file is one (its ``text`` or ``prompt``), a folder all its files.

    Args:
        paths: files and folders.
        without: a folder of which no file is read; None for none.

    Raises:
        ValueError: a path that is not there, a file that is no text, or a line without a text; the message names it.
    """
    for path in paths:
        if not path.exists():
            raise ValueError(f"there is no file or folder {path}")
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if not file.is_file() or (without is not None and file.resolve().is_relative_to(without.resolve())):
                continue
            try:
                text = file.read_text(encoding="utf-8-sig")
            except UnicodeDecodeError as error:
                raise ValueError(f"{file} is no UTF-8 text: {error}") from error
            if file.suffix.lower() == ".jsonl":
                yield from _lines(file, text)
            elif text:
                yield text


def nonempty_documents(paths: Sequence[Path], out: Path) -> list[str]:
    """Read texts as ``documents`` does.

    Raises:
        ValueError: also where there is no text, or where ``out``, which will be written, is one of the files.
    """
    if out.exists() and any(out.resolve().is_relative_to(path.resolve()) for path in paths):
        raise ValueError(f"cannot write {out}: it is one of the files to read; choose another --out")
    texts = list(documents(paths))
    if not any(text.strip() for text in texts):
        raise ValueError(f"there is no text in {', '.join(map(str, paths))}")
    return texts


def _lines(file: Path, text: str) -> Iterator[str]:
    """Read the texts of JSON lines."""
    for number, line in enumerate(text.split("\n"), 1):  # other line ends may be inside a string
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:  # numbers of 5000 digits, deep nesting
            raise ValueError(f"line {number} of {file} is not JSON: {error}") from error
        found = record.get("text", record.get("prompt")) if isinstance(record, dict) else None
        if not isinstance(found, str):
            raise ValueError(f"line {number} of {file} must have a text or prompt that is a string")
        try:
            found.encode()  # half of a pair of surrogates can be written in JSON
        except UnicodeEncodeError as error:
            raise ValueError(f"line {number} of {file} is no UTF-8 text: {error}") from error
        if found:
            yield found


def encode_turn(tokenizer: Any, prompt: str, *, chat: bool) -> list[int]:
    """Return the tokens of a prompt, with ``chat`` as the first turn of a conversation by the tokenizer's template.

    Raises:
        ValueError: the tokenizer has no chat template.
    """
    if not chat:
        return list(tokenizer(prompt, verbose=False)["input_ids"])
    if tokenizer.chat_template is None:
        raise ValueError("the target's tokenizer has no chat template; leave --chat out")
    turn = [{"role": "user", "content": prompt}]
    return list(tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True)["input_ids"])
