"""The page that shows token trees, as one HTML document: of a server, or of one text in a file."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stree.decode.step_records import StepRecord
from stree.decode.stop_strings import TokenBytes
from stree.decode.text import IncrementalText

__all__ = ["page_document", "step_json", "steps_json", "token_name"]

STATIC = Path(__file__).with_name("static")
DIGITS = 4  # of probabilities


def page_document(data: dict[str, Any]) -> tuple[str, str]:
    """Write the page as one document without references to others.

    Args:
        data: JSON-able: "server", how a server was started, for a page with a form; or "trees", a text with its steps,
            for a page that shows it, as ``client.js`` reads them.

    Returns:
        HTML, and its Content-Security-Policy, which allows no other script or style.
    """
    style, licence = _static("page.css"), f"/*\n{_static('d3-hierarchy.LICENSE')}*/\n"
    scripts = [licence + _static("d3-hierarchy.min.js"), _static("tree.js"), _static("page.js"), _static("client.js")]
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_digest, scripts))}; style-src {_digest(style)}; "
        "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'"
    )
    parts = {
        "policy": policy, "style": f"<style>{style}</style>", "data": json.dumps(data).replace("<", "\\u003c"),
        "scripts": "\n".join(f"<script>{script}</script>" for script in scripts),
    }  # fmt: skip
    pieces = _static("page.html").split("$$")  # $$name$$, and what is put in is not read again
    return "".join(parts[piece] if place % 2 else piece for place, piece in enumerate(pieces)), policy


def step_json(ids: Sequence[int], text: str, tree: StepRecord | None, token_bytes: TokenBytes) -> dict[str, Any]:
    """Write a step for the page.

    Args:
        ids: the tokens that the step has added to the text, at least one.
        text: what became certain by them.
        tree: what the step has done; None for the token after the prompt.
        token_bytes: of the tokenizer.
    """
    if tree is None:
        return {"text": text, "ids": [*ids], "tree": None}
    tokens = [*tree.tokens, tree.emitted[-1]]  # the target's own token comes last
    named = {
        "tokens": [token_name(token_bytes, token) for token in tokens],
        "special": [node for node, token in enumerate(tokens) if not token_bytes.piece(token).is_shown],
        "parents": [*tree.parents, tree.path[-1]], "path": tree.path, "kept": len(ids),
        "values": _rounded(tree.values), "target_probs": _rounded(tree.target_probs),
        "draft_probs": _rounded(_draft_probs(tree)),
    }  # fmt: skip
    return {"text": text, "ids": [*ids], "tree": named}


def steps_json(
    prompt: Sequence[int], new: Sequence[int], trees: Sequence[StepRecord], token_bytes: TokenBytes
) -> list[dict[str, Any]]:
    """Write all steps of a text that ``generate`` has returned, the token after the prompt first."""
    text, steps, place = IncrementalText(token_bytes, prompt), list[dict[str, Any]](), 0
    for tree in (None, *trees):
        if ids := new[place : place + (1 if tree is None else len(tree.emitted))]:
            place += len(ids)
            steps.append(step_json(ids, text.push(ids), tree, token_bytes))
    if steps:
        steps[-1]["text"] += text.push([], is_last=True)
    return steps


def token_name(token_bytes: TokenBytes, token: int, *, is_first: bool = False, mark: str = "") -> str:
    """Return what a token adds to a text; of a part of a character, a mark and its bytes, as OpenAI writes them."""
    piece = token_bytes.piece(token)
    own = piece.first if is_first or not piece.is_shown else piece.later
    try:
        return own.decode()
    except UnicodeDecodeError:
        return mark + own.decode(errors="backslashreplace")


def _draft_probs(tree: StepRecord) -> list[float | None] | None:
    """Return the draft's probability of each node; None for those of which it is not known, or where none is."""
    if tree.node_probs is not None or tree.draft_probs is None:
        return tree.node_probs
    on_path = dict(zip(tree.path[1:], tree.draft_probs, strict=True))
    return [on_path.get(node) for node in range(len(tree.tokens))]


def _rounded(probs: Sequence[float | None] | None) -> list[float | None] | None:
    return None if probs is None else [None if prob is None else round(prob, DIGITS) for prob in probs]


def _static(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
