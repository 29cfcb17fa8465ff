"""Tree speculative decoding for Mamba and hybrid Mamba-attention language models."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stree import distill, drafters, growth, heads, testing, verify
    from stree.decode.grammar import Grammar
    from stree.decode.step_records import StepRecord
    from stree.generation import Generation, GenerationError, GenerationInterrupted, generate
    from stree.integrations.transformers import custom_generate
    from stree.models.tree_lm import TreeLM
    from stree.sampling import Random, Sampling
    from stree.serving import Engine, QueueFull
    from stree.streaming import TokenStream, stream
    from stree.tree import TokenTree
    from stree.verify import Acceptance, DraftLaws, DraftProbs, accept

__all__ = [
    "Acceptance",
    "DraftLaws",
    "DraftProbs",
    "Engine",
    "Generation",
    "GenerationError",
    "GenerationInterrupted",
    "Grammar",
    "QueueFull",
    "Random",
    "Sampling",
    "StepRecord",
    "TokenStream",
    "TokenTree",
    "TreeLM",
    "accept",
    "custom_generate",
    "distill",
    "drafters",
    "generate",
    "growth",
    "heads",
    "stream",
    "testing",
    "verify",
]

# Looked up on first use, so that ``import stree`` loads neither torch nor transformers.
_HOMES = {
    "Acceptance": "stree.verify",
    "DraftLaws": "stree.verify",
    "DraftProbs": "stree.verify",
    "Engine": "stree.serving",
    "Generation": "stree.generation",
    "GenerationError": "stree.generation",
    "GenerationInterrupted": "stree.generation",
    "Grammar": "stree.decode.grammar",
    "QueueFull": "stree.serving",
    "Random": "stree.sampling",
    "Sampling": "stree.sampling",
    "StepRecord": "stree.decode.step_records",
    "TokenStream": "stree.streaming",
    "TokenTree": "stree.tree",
    "TreeLM": "stree.models.tree_lm",
    "accept": "stree.verify",
    "custom_generate": "stree.integrations.transformers",
    "generate": "stree.generation",
    "stream": "stree.streaming",
}


def __dir__() -> list[str]:
    """List every public name, also before its first use, for completion in shells and notebooks."""
    return sorted({*globals(), *__all__, "__version__"})


def __getattr__(name: str) -> Any:
    """Import a public name."""
    if name == "__version__":
        from importlib.metadata import version

        return version("stree")
    if name in ("distill", "drafters", "growth", "heads", "testing", "verify"):
        return importlib.import_module(f"stree.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'stree' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
