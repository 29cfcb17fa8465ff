"""What ``--compile`` would bring, where a model runs operation by operation on a CPU."""

from __future__ import annotations

import os
import shutil
from typing import Any

__all__ = ["MANY_TOKENS", "advice"]

MANY_TOKENS = 500  # of a text, from where a process saves more time than it takes to load or compile its functions
MOST_BYTES = 2e9  # of weights: steps of larger models mostly read these, compiled or not


def advice(lm: Any) -> str | None:
    """Return a line about ``--compile`` for a model that it would make faster, or None for others.

    Args:
        lm: a loaded ``TreeLM``.
    """
    if lm.device.type != "cpu" or lm.is_compiled or lm.is_sharded or shutil.which(os.environ.get("CXX", "g++")) is None:
        return None
    has_experts = any("expert" in name for name, _ in lm.model.named_parameters())  # such models are not compiled
    if has_experts or sum(weight.nbytes for weight in lm.model.parameters()) > MOST_BYTES:
        return None
    return (
        "steps run operation by operation; --compile makes those of small models two to four times as fast, "
        "after a second in each process and a minute or more in the first one"
    )
