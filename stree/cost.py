"""What a step costs on this machine, for this pair: a measured table, read by whoever chooses a budget.

``stree bench cost`` measures it.  The file is JSON::

    {"schema": 1,
     "target": "bundled", "drafter": "bundled", "device": "AMD EPYC", "dtype": "float32", "threads": 2,
     "target_ms": [{"batch": 1, "context": 64, "nodes": 16, "ms": 9.1}, ...],    verify of a tree and commit of a path
     "draft_ms":  [{"batch": 1, "context": 64, "width": 4, "ms": 1.9}, ...],     one draft call that runs width nodes
     "env": {...}}                                                               versions, commit, date

``draft_ms`` is empty without a drafter.  Every list is a full grid.  It knows no model and imports nothing of stree.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from stree.files import replacing

__all__ = ["SCHEMA", "CostTable", "default_path"]

SCHEMA = 1
NAMES = ("target", "drafter", "device", "dtype", "threads")


def default_path(target: str, drafter: str | None, device: str, dtype: str, threads: int) -> Path:
    """Name the file in which the table of a pair on a machine is cached: under $XDG_CACHE_HOME/stree."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    key = json.dumps([target, drafter, device, dtype, threads])
    return root / "stree" / f"cost-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


@dataclass(frozen=True, eq=False)
class CostTable:
    """Measured milliseconds, interpolated.

    Attributes:
        target: name or path of the target.
        drafter: of the drafter, or None.
        device: the processor or GPU.
        dtype: of the weights.
        threads: CPU threads.
        target_ms: (batch, context, nodes, ms) of every measured step.
        draft_ms: (batch, context, width, ms) of every measured draft call.
        env: what else is known of the machine.

    Raises:
        ValueError: a grid with holes, or a time that is not positive.
    """

    target: str
    drafter: str | None
    device: str
    dtype: str
    threads: int
    target_ms: Sequence[tuple[int, int, int, float]]
    draft_ms: Sequence[tuple[int, int, int, float]] = ()
    env: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_target", _Grid("target_ms", self.target_ms))
        if self.draft_ms:
            object.__setattr__(self, "_draft", _Grid("draft_ms", self.draft_ms))

    def target_step(self, nodes: int, batch: int = 1, context: int = 0) -> float:
        """Give the milliseconds of verifying ``nodes`` nodes a sequence and committing a path."""
        return float(self._target.at(batch, context, nodes))  # type: ignore[attr-defined]

    def draft_call(self, width: int, batch: int = 1, context: int = 0) -> float:
        """Give the milliseconds of one draft call that runs ``width`` nodes a sequence.

        Raises:
            ValueError: the table was measured without a drafter.
        """
        if not self.draft_ms:
            raise ValueError(f"the cost table of {self.target!r} was measured without a drafter")
        return float(self._draft.at(batch, context, width))  # type: ignore[attr-defined]

    def check(self, target: str, drafter: str | None, device: str, dtype: str, threads: int) -> None:
        """Refuse a table of another pair or machine.

        Raises:
            ValueError: the first difference.
        """
        for name, asked in zip(NAMES, (target, drafter, device, dtype, threads), strict=True):
            if getattr(self, name) != asked:
                raise ValueError(
                    f"the cost table was measured for {name} {getattr(self, name)!r}, not {asked!r}; "
                    "measure anew with stree bench cost"
                )

    def save(self, path: Path) -> None:
        """Write the table, in one move."""
        record: dict[str, Any] = {"schema": SCHEMA, **{name: getattr(self, name) for name in NAMES}}
        for name, size in (("target_ms", "nodes"), ("draft_ms", "width")):
            keys = ("batch", "context", size, "ms")
            record[name] = [dict(zip(keys, point, strict=True)) for point in getattr(self, name)]
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as beside:
            beside.write_text(json.dumps({**record, "env": dict(self.env)}, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> CostTable:
        """Read a table.

        Raises:
            ValueError: no file there, one that is no cost table, or one of another schema.
        """
        if not path.is_file():
            raise ValueError(f"there is no cost table at {path}; measure one with stree bench cost")
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            schema = record["schema"]
            points: dict[str, Any] = {
                name: [(p["batch"], p["context"], p[size], p["ms"]) for p in record[name]]
                for name, size in (("target_ms", "nodes"), ("draft_ms", "width"))
                if schema == SCHEMA
            }
            known = {name: record[name] for name in NAMES}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no cost table: {type(error).__name__} {error}") from error
        if schema != SCHEMA:
            raise ValueError(f"{path} has schema {schema}, this version reads {SCHEMA}; measure anew")
        return cls(**known, **points, env=record.get("env", {}))


class _Grid:
    """A full grid of (batch, context, size) with a time at every point, read by linear interpolation.

    Beyond the largest measured value the last slope goes on; below the smallest its value is taken.
    """

    def __init__(self, name: str, points: Iterable[tuple[int, int, int, float]]) -> None:
        times = {point[:3]: point[3] for point in points}
        self.axes = [np.array(sorted({key[axis] for key in times}), dtype=float) for axis in range(3)]
        sizes = tuple(map(len, self.axes))
        if not times or len(times) != int(np.prod(sizes)):
            raise ValueError(f"{name} must be a full grid: {len(times)} points do not fill {sizes}")
        if not all(np.isfinite(ms) and ms > 0 for ms in times.values()):
            raise ValueError(f"every time of {name} must be positive, got {min(times.values())}")
        self.values = np.array([times[key] for key in sorted(times)], dtype=float).reshape(sizes)

    def at(self, *place: float) -> float:
        """Interpolate along one axis after the other."""
        values = self.values
        for axis, x in zip(self.axes, place, strict=True):
            values = _along(axis, values, max(x, axis[0]))
        return float(values)


def _along(axis: np.ndarray, values: np.ndarray, x: float) -> np.ndarray:
    """Interpolate the first dimension at x, which is not below the axis."""
    if len(axis) == 1:
        return np.asarray(values[0])
    right = min(int(np.searchsorted(axis, x, side="right")), len(axis) - 1)
    share = (x - axis[right - 1]) / (axis[right] - axis[right - 1])
    return np.asarray(values[right - 1] + share * (values[right] - values[right - 1]))
