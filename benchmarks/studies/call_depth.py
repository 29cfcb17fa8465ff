"""Count the files, functions and nested frames of the package that one generation passes through.

Run with ``python -m benchmarks.studies.call_depth``.  It counts the second of two equal calls of ``generate``, so that
what is made once for a model is left out, and prints one JSON line.  ``--list`` also prints the files with the number
of their functions, and the deepest stack.  Comprehensions are not counted as functions.
"""

import json
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import stree
from benchmarks import ROOT

BARS = {"files": 48, "functions": 250, "frames": 14}


@cache
def place_of(filename: str) -> str:
    """Return a file's path in the repository if it is part of the package, else an empty string."""
    path = Path(filename).resolve()
    is_ours = any(path.is_relative_to(ROOT / area) for area in ("stree", "kernels", "models"))
    return str(path.relative_to(ROOT)) if is_ours else ""


def count(max_new_tokens: int = 24) -> tuple[set[str], list[str]]:
    """Return the functions of the package that a generation calls, as FILE:LINE NAME, and its deepest stack of them."""
    target, draft = (stree.TreeLM.from_pretrained(ROOT / "stree/assets" / name) for name in ("target", "drafter"))
    options: dict[str, Any] = {"budget": 16, "max_new_tokens": max_new_tokens, "seed": 1}
    options |= {"drafter": stree.drafters.ModelDrafter(draft), "sampling": stree.Sampling(temperature=0.8)}
    called, stack, deepest = set[str](), list[str](), list[str]()

    def trace(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        place = place_of(code.co_filename) if event in ("call", "return") else ""
        if not place or (code.co_name.startswith("<") and code.co_name != "<lambda>"):
            return
        stack.append(f"{place}:{code.co_firstlineno} {code.co_qualname}") if event == "call" else stack.pop()
        called.update(stack[-1:])
        if len(stack) > len(deepest):
            deepest[:] = stack

    for profile in (None, trace):
        sys.setprofile(profile)
        stree.generate(target, [[5, 17, 9, 33, 20]], **options)
    sys.setprofile(None)
    return called, deepest


if __name__ == "__main__":
    functions, frames = count()
    files = Counter(function.partition(":")[0] for function in functions)
    if "--list" in sys.argv:
        print(*(f"{number:4} {file}" for file, number in files.most_common()), "", *frames, "", sep="\n")
    print(json.dumps({"files": len(files), "functions": len(functions), "frames": len(frames), "bars": BARS}))
