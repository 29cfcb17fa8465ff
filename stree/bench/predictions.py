"""Predicted times of a step on a GPU, from the bandwidth of a copy there; docs/gpu.md says how they were made."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CARDS", "PREDICTED", "predicted_ms"]

CARDS = {"H100": 3.0e12, "H200": 4.3e12}  # bytes a second that a copy reaches, read and written
SHARE = 0.84  # of it that a scan reaches


@dataclass(frozen=True, slots=True)
class Step:
    """Parts of a step in milliseconds at batch 1, context 256, in bfloat16, where a copy reaches what an H200 does.

    Attributes:
        products: matrix products, bound by the bandwidth.
        recurrent: recurrent layers.
        rest: attention, norms, launches.
        scan_bytes: of all recurrent layers, which the bandwidth bounds; the rest of them is latency.
    """

    products: float
    recurrent: float
    rest: float
    scan_bytes: float


def _scan_bytes(layers: int, heads: int, groups: int, nodes: int, headdim: int = 64, dstate: int = 128) -> float:
    inner = heads * headdim
    channels = inner + 2 * groups * dstate
    return layers * (8.0 * inner * dstate + 2 * nodes * (2 * channels + inner) + 4 * nodes * heads)


_MS = {
    "mamba2-2.7b": {1: (1.57, 1.20, 0.04), 16: (1.65, 1.40, 0.05), 64: (1.79, 2.36, 0.05)},
    "Nemotron-H-8B": {1: (4.71, 0.45, 0.31), 16: (4.96, 0.53, 0.34), 64: (5.38, 0.88, 0.41)},
}
_SIZES = {"mamba2-2.7b": (64, 80, 1), "Nemotron-H-8B": (24, 128, 8)}  # recurrent layers, heads, groups
PREDICTED: dict[str, dict[int, Step]] = {
    model: {nodes: Step(*parts, _scan_bytes(*_SIZES[model], nodes)) for nodes, parts in steps.items()}
    for model, steps in _MS.items()
}


def predicted_ms(model: str, nodes: int, bandwidth: float) -> dict[str, float] | None:
    """Predict a step of a model and a number of nodes: milliseconds by part, and in all; None for others.

    Args:
        model: name, as in ``PREDICTED``.
        nodes: of the tree, root included.
        bandwidth: bytes a second of a copy.
    """
    step = PREDICTED.get(model, {}).get(nodes)
    if step is None:
        return None
    slower = 1 / bandwidth - 1 / CARDS["H200"]
    parts = {
        "products": step.products * CARDS["H200"] / bandwidth,
        "recurrent": step.recurrent + 1e3 * step.scan_bytes / SHARE * slower,
        "rest": step.rest,
    }
    return parts | {"total": sum(parts.values())}
