"""Tiny configurations of the families with gated delta rules, short convolutions, lightning attention and RG-LRU."""

from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedModel

BUILDERS: dict[str, Callable[..., PreTrainedModel]] = {}
