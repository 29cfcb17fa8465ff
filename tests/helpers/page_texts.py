"""Texts for the page that shows token trees: random ones of any size, written as the server writes them."""

from __future__ import annotations

import random
import re
from typing import Any

from stree.serving.document import page_document

NAMES = [" the", " apples", "\n", ".", " extraordinarily long token", "<b>", "中文", "\u202e", "", "a", " ", "\t\t"]


def random_step(draw: random.Random, nodes: int, number: int) -> dict[str, Any]:
    """Return a step whose tree has so many nodes; its path goes down at random."""
    parents = [-1, *(draw.randrange(max(0, node - 12), node) for node in range(1, nodes))]
    path = [0]
    while children := [node for node in range(nodes) if parents[node] == path[-1]]:
        path.append(draw.choice(children))
    tokens = [draw.choice(NAMES) for _ in range(nodes + 1)]
    tree = {
        "tokens": tokens, "special": [2], "parents": [*parents, path[-1]], "path": path, "kept": len(path),
        "values": [round(draw.random(), 3) for _ in range(nodes)], "target_probs": [0.5] * len(path),
        "draft_probs": [None] + [0.25] * (nodes - 1),
    }  # fmt: skip
    return {"text": f" word{number}", "ids": [number] * len(path), "tree": tree}


def random_page(seed: int, *, steps: int, nodes: int, prompt: str = "A prompt") -> str:
    """Return the page of a text of so many steps."""
    draw = random.Random(seed)
    texts = [{"text": "First", "ids": [0], "tree": None}, *(random_step(draw, nodes, n) for n in range(1, steps + 1))]
    figures = {"prefill_s": 0.1, "decode_s": 2.0, "finish_reason": "length"}
    return page_document({"trees": {"settings": {"prompt": prompt}, "steps": texts, "figures": figures}})[0]


def luminance(colour: str) -> float:
    """Return the relative luminance of a CSS colour, as WCAG defines it."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
