"""Text, tokenizer and packed token streams for `bundled.py`.

Knows nothing of models: it reads text folders, holds named packages and books out, trains the byte-level BPE and
packs encoded documents into flat streams with an end-of-text token after each one.
"""

import io
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers
import zstandard
from rich.console import Console
from rich.progress import track
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from stree.distill.text import encode

END_OF_TEXT = "<|endoftext|>"

HELD_OUT = (
    "anyio",
    "fsspec",
    "jinja2",
    "Bram Stoker/The Lair of the White Worm.md",
    "H.G. Wells/The Invisible Man.md",
)
"""Sources (packages) and paths (books) that no model is trained on; bits per byte are measured on them."""

TEST_ONLY = ("HumanEval.jsonl", "test.jsonl", "question.jsonl")
"""File names of evaluation sets, never read as training text."""

MIXTURE = {"python": 0.55, "english": 0.30, "gsm8k": 0.15}
"""Share of the training windows drawn from each kind of text."""

SOURCE_CAP = 10_000_000
"""Characters taken from one source at most, so that three large packages do not crowd out the others."""

MAX_PASSES = {"gsm8k": 3.0}
"""Passes over a stream after which it is left out of the mixture; without an entry, no limit."""


@dataclass(frozen=True, slots=True)
class Document:
    """One text with its kind (a key of `MIXTURE`), its source and its path."""

    kind: str
    source: str
    path: str
    text: str

    @property
    def held_out(self) -> bool:
        """Whether the document is kept for measuring."""
        return self.source in HELD_OUT or self.path in HELD_OUT


def read_jsonl(path: Path) -> Iterator[dict]:
    """Yield the records of a `.jsonl` or `.jsonl.zst` file."""
    with path.open("rb") as raw:
        stream = zstandard.ZstdDecompressor().stream_reader(raw) if path.suffix == ".zst" else raw
        for line in io.TextIOWrapper(stream, encoding="utf-8"):
            if line.strip():
                yield json.loads(line)


def read_file(path: Path, root: Path) -> Iterator[Document]:
    """Yield the documents of one file: records with `text`, or with `question` and `answer`, or a plain text."""
    if path.name.endswith((".jsonl", ".jsonl.zst")):
        kind = "python" if "python" in path.name else "english"
        for record in read_jsonl(path):
            if "text" in record:
                source, name = record.get("source", path.name), record.get("path", "")
                yield Document(kind, source, name, record["text"])
            elif "question" in record and "answer" in record:
                text = f"Question: {record['question']}\nAnswer: {record['answer']}\n"
                yield Document("gsm8k", "gsm8k", path.name, text)
    else:
        kind = "python" if path.suffix == ".py" else "english"
        yield Document(kind, root.name, path.relative_to(root).as_posix(), path.read_text("utf-8", "replace"))


def read_folders(folders: Sequence[Path], seed: int) -> list[Document]:
    """Read every text below the folders, shuffled, with at most `SOURCE_CAP` characters a source.

    Args:
        folders: folders (or single files) of .jsonl.zst, .jsonl, .txt, .md and .py files.
        seed: fixes the shuffle, and with it which documents a capped source keeps.

    Raises:
        FileNotFoundError: a folder is missing or holds no text.
    """
    documents: list[Document] = []
    for folder in folders:
        files = [folder] if folder.is_file() else sorted(p for p in folder.rglob("*") if p.is_file())
        wanted = (".jsonl", ".jsonl.zst", ".txt", ".md", ".py")
        files = [p for p in files if p.name.endswith(wanted) and p.name not in TEST_ONLY and p.name != "README.md"]
        if not files:
            raise FileNotFoundError(f"no training text in {folder}; expected files ending in {', '.join(wanted)}")
        for path in track(files, f"read {folder.name}", console=Console(stderr=True)):
            documents.extend(read_file(path, folder))
    random.Random(seed).shuffle(documents)
    taken: dict[str, int] = {}
    kept = []
    for document in documents:
        if document.held_out or taken.get(document.source, 0) < SOURCE_CAP:
            kept.append(document)
            taken[document.source] = taken.get(document.source, 0) + len(document.text)
    return kept


def train_tokenizer(documents: Sequence[Document], vocab_size: int, characters: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on the mixture; the end-of-text token has id 0 and serves as bos, eos and pad."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    left = {kind: share * characters for kind, share in MIXTURE.items()}
    texts = []
    for document in documents:
        if not document.held_out and left[document.kind] > 0:
            left[document.kind] -= len(document.text)
            texts.append(document.text)
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def encode_streams(documents: Sequence[Document], tokenizer: PreTrainedTokenizerFast) -> dict[str, np.ndarray]:
    """Encode the training documents of every kind into one packed stream a kind."""
    texts = {kind: [d.text for d in documents if d.kind == kind and not d.held_out] for kind in MIXTURE}
    eos, size = int(tokenizer.eos_token_id), len(tokenizer)
    return {kind: encode(each, tokenizer, size, eos) for kind, each in texts.items() if each}
