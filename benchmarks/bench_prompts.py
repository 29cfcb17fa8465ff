"""Prompt suites: HumanEval, GSM8K, MT-Bench and Spec-Bench files, plain JSON lines and plain text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# Field of a record -> the prompt it makes.  GSM8K is asked as the bundled pair's training text has it; of a
# conversation (MT-Bench, Spec-Bench) the first turn is taken.
FORMATS: Mapping[str, Callable[[Any], str]] = {
    "prompt": str,
    "question": lambda question: f"Question: {question}\nAnswer:",
    "turns": lambda turns: str(turns[0]),
    "text": str,
}


def parse_suites(text: str) -> dict[str, Path]:
    """Read NAME=FILE,NAME=FILE,...

    Raises:
        ValueError: an entry without a name, a name given twice, or a file that is not there.
    """
    suites: dict[str, Path] = {}
    for entry in text.split(","):
        name, equals, file = entry.partition("=")
        if not (name and equals and file):
            raise ValueError(f"a suite must be NAME=FILE, got {entry!r}")
        if name in suites:
            raise ValueError(f"suite {name!r} is given twice")
        if not Path(file).is_file():
            raise ValueError(f"suite {name!r}: there is no file {file!r}")
        suites[name] = Path(file)
    return suites


def read_prompts(path: Path, limit: int | None = None) -> list[str]:
    """Read the first prompts of a file: a record a line of .jsonl, else paragraphs between blank lines.

    Raises:
        ValueError: a record without a known field, or a file without prompts.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        lines = [line for line in text.splitlines() if line.strip()][:limit]
        prompts = [prompt_of(json.loads(line)) for line in lines]
    else:
        prompts = [part.strip() for part in text.split("\n\n") if part.strip()][:limit]
    if not prompts:
        raise ValueError(f"{path.name} holds no prompts")
    return prompts


def prompt_of(record: Mapping[str, Any]) -> str:
    """Make the prompt of one record.

    Raises:
        ValueError: it has none of the known fields.
    """
    for field, make in FORMATS.items():
        if field in record:
            return make(record[field])
    raise ValueError(f"a record needs one of the fields {', '.join(FORMATS)}, got {', '.join(record) or 'none'}")
