"""The first requests of an engine, before it serves others."""

from __future__ import annotations

from stree.sampling import Sampling
from stree.serving.engine import Engine

__all__ = ["run_first_requests"]

FEW_TOKENS = 16


def run_first_requests(engine: Engine) -> None:
    """Decode a greedy and a sampled request whose tokens are discarded, so that a server is ready when it says so.

    Raises:
        GenerationError: the engine cannot decode.
    """
    count = min(FEW_TOKENS, engine.max_length - 1)
    for sampling in (Sampling(), Sampling(1.0)) if count else ():
        engine.submit([1], sampling=sampling, max_new_tokens=count, ignore_eos=True).result()
    engine.clear_cache()
