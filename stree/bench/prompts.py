"""Prompt suites: the bundled ones, official files of other benchmarks, plain JSON lines and plain text.

Of HumanEval, GSM8K, MT-Bench and Spec-Bench the file is one suite, of SPEED-Bench one for each of its categories.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from stree.inputs import ASSETS

__all__ = ["Prompt", "parse_suites", "read_categories", "read_suite"]

BUNDLED = ("code", "mathematics", "chat")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a suite.

    Attributes:
        suite: name of the suite.
        index: place in its file.
        turns: what the user says; a later turn is asked with the answers to the earlier ones in context.
    """

    suite: str
    index: int
    turns: tuple[str, ...]


def _one(text: Any) -> tuple[str, ...]:
    """One turn, the text itself."""
    return (_text(text),)


def _question(text: Any) -> tuple[str, ...]:
    """Ask a GSM8K question in the form that the bundled pair's training text has."""
    return (f"Question: {_text(text)}\nAnswer:",)


def _turns(turns: Any) -> tuple[str, ...]:
    """Take a conversation's turns."""
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"turns must be a list of texts, got {turns!r}")
    return tuple(_text(turn) for turn in turns)


def _text(value: Any) -> str:
    """Refuse what is no text, or an empty one, or half a character."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"a prompt must be a text that is not empty, got {value!r}")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # half a character, which JSON can write and no tokenizer takes
        raise ValueError(f"a prompt must be text of whole characters: {error}") from error
    return value


# Field of a record -> the turns it makes, in the order in which the fields are looked for.
FIELDS: Mapping[str, Callable[[Any], tuple[str, ...]]] = {
    "prompt": _one,
    "question": _question,
    "turns": _turns,
    "text": _one,
}
# The field that an official file has; a suite of another name may have any.
OFFICIAL = {"humaneval": "prompt", "gsm8k": "question", "mt_bench": "turns", "spec_bench": "turns"}
SPEED_BENCH = "speed_bench"  # how the name of a suite begins whose file has the columns of SPEED-Bench
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"  # SPEED-Bench's, until its own script has run


def parse_suites(text: str) -> dict[str, Path]:
    """Read NAME=FILE,NAME=FILE,...; ``bundled`` stands for the suites code, mathematics and chat of this package.

    Raises:
        ValueError: an entry without a name, a name given twice or with other signs than letters, digits, - and _, which
            tables and plots may read as their own, or a file that is not there.
    """
    suites: dict[str, Path] = {}
    bundled = ",".join(f"{name}={ASSETS / 'prompts' / name}.jsonl" for name in BUNDLED)
    for entry in re.split(r",(?=[\w-]+=|$)", re.sub(r"(?:^|(?<=,))bundled(?=,|$)", lambda _: bundled, text)):
        name, _, file = entry.partition("=")
        if not (name and file):
            raise ValueError(f"a suite must be NAME=FILE, got {entry!r}")
        if not re.fullmatch(r"[^\W_][\w-]*", name):
            raise ValueError(f"a suite's name must be letters, digits, - and _, the first no _ or -, got {name!r}")
        if name in suites:
            raise ValueError(f"suite {name!r} is given twice")
        if not Path(file).is_file():
            raise ValueError(f"suite {name!r}: there is no file {file!r}")
        suites[name] = Path(file)
    return suites


def read_suite(name: str, path: Path, limit: int | None = None) -> list[Prompt]:
    """Read the first prompts of a file: a record a line of .jsonl and of official suites, else paragraphs.

    Args:
        name: of the suite; humaneval, gsm8k, mt_bench and spec_bench must have their official file's field.
        path: the file.
        limit: most prompts, or None for all.

    Raises:
        ValueError: a line that is no such record (the message names it), or a file without prompts.
    """
    text = _read_text(name, path)
    turns: list[tuple[str, ...]] = []
    if path.suffix.lower() == ".jsonl" or name in OFFICIAL:
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip() and (limit is None or len(turns) < limit):
                try:
                    turns.append(_turns_of(name, line))
                except ValueError as error:
                    raise ValueError(f"suite {name!r}: line {number} of {path.name}: {error}") from error
    else:
        turns += [(part.strip(),) for part in re.split(r"\n\s*\n", text) if part.strip()][:limit]
    if not turns:
        raise ValueError(f"suite {name!r}: {path.name} holds no prompts")
    return [Prompt(name, index, each) for index, each in enumerate(turns)]


def read_categories(name: str, path: Path, limit: int | None = None) -> dict[str, list[Prompt]]:
    """Read the first prompts of each category of a SPEED-Bench file: NAME-CATEGORY -> prompts.

    Another file is one suite, read by ``read_suite``.
    The file is one that SPEED-Bench's ``prepare_data.py`` writes (Parquet), or JSON lines with its columns ``category``
    and ``turns``.

    Args:
        name: of the suite; speed_bench, or a name that begins so, for SPEED-Bench.
        path: the file.
        limit: most prompts of a category, or None for all.

    Raises:
        ValueError: as for ``read_suite``, prompts of SPEED-Bench that its script has not filled in, or Parquet without
            pyarrow.
    """
    if not name.startswith(SPEED_BENCH):
        return {name: read_suite(name, path, limit)}
    found: dict[str, list[Prompt]] = {}
    for number, read in enumerate(_records(name, path), 1):
        try:
            record = read()
            turns, category = _turns(record.get("turns")), _text(record.get("category"))
            if any(turn.startswith(PLACEHOLDER) for turn in turns):
                raise ValueError("it has no text yet; run SPEED-Bench's prepare_data.py, which fetches it")
        except ValueError as error:
            raise ValueError(f"suite {name!r}: record {number} of {path.name}: {error}") from error
        prompts = found.setdefault(f"{name}-{re.sub(r'[^a-z]+', '_', category.lower()).strip('_')}", [])
        if limit is None or len(prompts) < limit:
            prompts.append(Prompt(name, number - 1, turns))
    if not found:
        raise ValueError(f"suite {name!r}: {path.name} holds no prompts")
    return found


def _read_text(name: str, path: Path) -> str:
    """Read the text of a suite's file."""
    try:
        return path.read_text(encoding="utf-8-sig")  # a mark of its encoding is no text
    except UnicodeDecodeError as error:
        raise ValueError(f"suite {name!r}: {path.name} is not UTF-8 text: {error}") from error


def _records(name: str, path: Path) -> list[Callable[[], dict[str, Any]]]:
    """List what reads each record of SPEED-Bench."""
    if path.suffix.lower() != ".parquet":
        lines = _read_text(name, path).split("\n")
        return [partial(_record, line) for line in lines if line.strip()]
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ValueError("reading Parquet needs the package pyarrow: pip install 'stree[parquet]'") from error
    try:
        rows = parquet.read_table(path, columns=["category", "turns"]).to_pylist()
    except (ArrowException, OSError) as error:
        raise ValueError(f"cannot read {path} as Parquet: {str(error).strip().splitlines()[0]}") from error
    return [partial(dict, row) for row in rows]


def _record(line: str) -> dict[str, Any]:
    """Parse the JSON object of one line."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from error
    if not isinstance(record, dict):
        raise ValueError(f"a record must be a JSON object, got {type(record).__name__}")
    return record


def _turns_of(name: str, line: str) -> tuple[str, ...]:
    """Make the turns of one line."""
    record = _record(line)
    known = [OFFICIAL[name]] if name in OFFICIAL else list(FIELDS)
    field = next((field for field in known if field in record), None)
    if field is None:
        raise ValueError(
            f"a record needs {'the field' if len(known) == 1 else 'one of the fields'} {', '.join(known)}, "
            f"got {', '.join(record) or 'none'}"
        )
    return FIELDS[field](record[field])
