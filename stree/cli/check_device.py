"""``stree doctor``: compare the kernels with their references on this device, and time steps beside a prediction."""

from __future__ import annotations

import getpass
import re
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Mamba2Config, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from stree.bench.device_clock import binary_parents, time_calls, time_graph, tree_step
from stree.bench.predictions import predicted_ms
from stree.bench.profile import bytes_moved, copy_bandwidth
from stree.bench.records import environment
from stree.cli.device_models import MODELS
from stree.drafters import ModelDrafter
from stree.generation import generate
from stree.inputs import locate
from stree.kernels import ops
from stree.kernels.dispatch import as_on_device
from stree.kernels.precision import float32_tolerance
from stree.models.self_check import layer_errors, model_error
from stree.models.tree_lm import TreeLM
from stree.sampling import Sampling

__all__ = ["attempted", "check_device", "compare_with_forwards", "without_names"]

MINUTES = 9.0  # after which no further part begins
BATCH, NODES, TERMS, CONTEXT = 2, 16, 512, 256
HALF_BOUND = 2e-2  # of bfloat16 outputs, which are rounded to 8 bits
SIZES = (1, 16, 64)  # nodes of the steps that are timed
LARGE = {"hidden_size": 2560, "num_hidden_layers": 64, "num_heads": 80, "vocab_size": 50288}  # mamba2-2.7b
SMALL = {"hidden_size": 768, "num_hidden_layers": 24, "num_heads": 24, "vocab_size": 50288}  # mamba2-130m
LARGE_BYTES = 12e9  # of free memory that its weights and states need


def check_device(device: torch.device) -> dict[str, Any]:
    """Run every part on a device.

    Args:
        device: a GPU, or the CPU, whose own kernels are compared then.

    Returns:
        A JSON-able dict without names of users, machines and folders.  "ok" says whether all agrees; a part that fails
        has an "error", and one that did not begin in time is "skipped".
    """
    began = time.monotonic()
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "operations": lambda: compare_operations(device), "layers": lambda: compare_layers(device),
        "texts": lambda: compare_texts(*bundled(device)), "steps": lambda: time_steps(device),
    }  # fmt: skip
    report: dict[str, Any] = {
        "stree": version("stree"), "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "env": environment(device),
    }  # fmt: skip
    for name, run in parts.items():
        start = time.monotonic()
        if start - began > 60 * MINUTES:
            report[name] = {"skipped": f"{MINUTES:g} minutes were over"}
            continue
        report[name] = {**attempted(run), "seconds": round(time.monotonic() - start, 1)}
    return report | {"ok": all(report[name].get("ok", False) for name in parts)}


def attempted(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run a part; where it fails, its result is the error in one line, so that the others are reported."""
    try:
        return run()
    except Exception as error:
        return {"ok": False, "error": without_names(f"{type(error).__name__}: {error}")}


def without_names(message: str) -> str:
    """Leave folders, the user and the machine out of the first line of a message."""
    line = re.sub(r"(?:~|[A-Za-z]:)?(?:[/\\][^\s/\\:'\",;()]+){2,}", "FILE", message.strip().split("\n")[0])
    names = [socket.gethostname()]
    with suppress(KeyError, OSError):  # as in a container whose user has no name
        names.append(getpass.getuser())
    for name in (name for name in names if len(name) > 2):
        line = re.sub(rf"\b{re.escape(name)}\b", "NAME", line)
    return line


def compare_operations(device: torch.device) -> dict[str, Any]:
    """Compare operations as they run on a device with their references: in float64, or, of draws, in equal numbers."""
    rows: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        generator = torch.Generator(device).manual_seed(0)
        for name, given in _operands(generator, dtype).items():
            op = getattr(ops, name)
            is_draw = name in ("choice", "draw_distinct", "philox_uniform")
            wide = given if is_draw else {key: _in_double(value) for key, value in given.items()}
            found, right = _tensors(op(**given)), _tensors(op(**wide, backend="reference"))
            error = max(_error(one.double(), other.double()) for one, other in zip(found, right, strict=True))
            bound = 0.0 if is_draw else float32_tolerance(TERMS) if dtype == torch.float32 else HALF_BOUND
            rows[f"{name} {str(dtype)[6:]}"] = {"error": error, "bound": bound, "ok": error <= bound}
    return {"compared": rows, "ok": all(row["ok"] for row in rows.values())}


def _operands(generator: torch.Generator, dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    """Draw arguments of operations, for binary trees."""

    def wide(*shape: int) -> Tensor:
        return torch.randn(BATCH, *shape, generator=generator, device=generator.device)

    def rows(*shape: int) -> Tensor:
        return wide(NODES, *shape).to(dtype)

    device = generator.device
    parents = binary_parents(BATCH, NODES, device)
    decay = wide(NODES, 4).abs() * -0.1
    unit_k, unit_q = (torch.nn.functional.normalize(wide(NODES, 2, 64), dim=-1).to(dtype) for _ in range(2))
    probs = wide(3, 5000).softmax(-1)
    counters = torch.arange(BATCH * 3, device=device).view(BATCH, 3)
    uniform = ops.philox_uniform(counters, counters, counters, seed=1, backend="reference")
    found: dict[str, dict[str, Any]] = {
        "ssd_tree_scan": {
            "x": rows(4, 64), "dt": wide(NODES, 4).abs() * 0.1, "A": -wide(4)[0].abs(), "B": rows(1, 64),
            "C": rows(1, 64), "parents": parents, "state": wide(4, 64, 64), "D": wide(4)[0],
        },
        "gated_delta_tree_scan": {
            "q": unit_q, "k": unit_k, "v": rows(4, 64), "g": decay, "beta": wide(NODES, 4).sigmoid(),
            "parents": parents, "state": wide(4, 64, 64),
        },
        "selective_tree_scan": {
            "x": rows(256), "dt": wide(NODES, 256).abs() * 0.1, "A": -wide(256, 16)[0].abs(), "B": rows(16),
            "C": rows(16), "parents": parents, "state": wide(256, 16),
        },
        "diagonal_tree_scan": {
            "log_a": wide(NODES, 256).abs() * -0.1, "x": rows(256), "parents": parents, "state": wide(256),
        },
        "tree_conv1d": {
            "x": rows(256), "weight": wide(256, 4)[0].to(dtype), "bias": wide(256)[0].to(dtype), "parents": parents,
            "window": wide(256, 3).to(dtype),
        },
        "tree_attention": {
            "q": rows(8, 64), "k_cache": wide(2, 300, 64).to(dtype), "v_cache": wide(2, 300, 64).to(dtype),
            "lengths": torch.full((BATCH,), 290, dtype=torch.int32, device=device), "k": rows(2, 64), "v": rows(2, 64),
            "parents": parents, "scale": 0.125,
        },
        "rms_norm": {"x": rows(256), "weight": wide(256)[0].to(dtype), "eps": 1e-5},
        "gated_rms_norm": {"x": rows(256), "gate": rows(256), "weight": wide(256)[0].to(dtype), "eps": 1e-5},
        "gated_activation": {"gate": rows(256), "up": rows(256)},
    }  # fmt: skip
    if dtype == torch.float32:  # draws are made in it whatever the model's
        found |= {
            "philox_uniform": {"position": counters, "sequence": counters, "node": counters, "seed": 1},
            "choice": {"probs": probs, "uniform": uniform},
            "draw_distinct": {"dist": probs, "uniform": uniform[..., None].expand(-1, -1, 4).contiguous()},
        }
    return found


def _in_double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _tensors(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else [*found]


def _error(found: Tensor, right: Tensor) -> float:
    """Return the largest difference as a share of the largest value; infinity for NaN."""
    difference = (found - right).abs().max() / right.abs().max().clamp(min=1e-30)
    return float(difference.nan_to_num(torch.inf))


def compare_layers(device: torch.device) -> dict[str, Any]:
    """Do what ``TreeLM.self_check`` does with small random models that together have every kind of layer."""
    rows: dict[str, Any] = {}
    for name, sizes in MODELS.items():
        torch.manual_seed(0)
        with torch.device(device):
            lm = TreeLM(AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](**sizes)).eval())
        rows |= compare_with_forwards(lm, f"logits of {name}")["compared"]
    return {"compared": rows, "ok": all(row["ok"] for row in rows.values())}


def compare_with_forwards(lm: TreeLM, logits: str = "logits") -> dict[str, Any]:
    """Do what ``TreeLM.self_check`` does; relative error and bound of each class, and of the logits."""
    errors = {**layer_errors(lm), logits: model_error(lm)}
    rows = {name: {"error": error, "bound": bound, "ok": error < bound} for name, (error, bound) in errors.items()}
    return {"compared": rows, "ok": all(row["ok"] for row in rows.values())}


def bundled(device: torch.device) -> tuple[TreeLM, TreeLM]:
    """Load the bundled pair in float32."""
    paths = locate("bundled", "target"), locate("bundled", "drafter")
    target, draft = (TreeLM.from_pretrained(path, device, "float32") for path in paths)
    return target, draft


def compare_texts(target: TreeLM, draft: TreeLM) -> dict[str, Any]:
    """Compare texts of launched, captured and replayed steps; on a CPU those of its kernels and of the reference."""
    prompts = [[7 + 3 * row, 100 + row, 200 + 11 * row, 30 + row] for row in range(2)]
    drafter, rows = ModelDrafter(draft), dict[str, Any]()
    for temperature in (0.0, 0.8):
        run = partial(
            generate, target, prompts, drafter, growth="calibrated:16x4", sampling=Sampling(temperature),
            max_new_tokens=48, ignore_eos=True, verifier="match",
        )  # fmt: skip
        plain = run(budget=1, growth=None)  # near-ties may differ: it has steps of other shapes
        captures, ways = target.captures_steps, {"by default": run()}
        graphs = ways["by default"].stats.get("graphs")
        if graphs:
            ways["replayed"] = run()
        target.captures_steps = False
        try:
            launched = run()
            if not graphs:
                with as_on_device(triton=False):
                    ways["reference"] = run()
        finally:
            target.captures_steps = captures
        row: dict[str, Any] = {way: found.sequences == launched.sequences for way, found in ways.items()}
        row["ok"] = all(row.values()) and not (graphs or {}).get("not_captured")
        row |= {"plain decoding": launched.sequences == plain.sequences, "tau": launched.stats["tau"]}
        row["graphs"] = {name: without_names(str(value)) for name, value in (graphs or {}).items()}
        rows[f"temperature {temperature:g}"] = row
    return {"equal_launched": rows, "ok": all(row["ok"] for row in rows.values())}


def time_steps(device: torch.device) -> dict[str, Any]:
    """Time steps, launched and, on a GPU, as CUDA graphs, beside the time of the bytes that each must move."""
    is_gpu, bandwidth = device.type == "cuda", copy_bandwidth(device)
    name, details = "bundled target", "float32"
    lm = bundled(device)[0] if not is_gpu else None
    if lm is None:
        is_large = torch.cuda.mem_get_info(device)[0] > LARGE_BYTES
        name, details = "mamba2-2.7b" if is_large else "mamba2-130m", "random weights, bfloat16"
        config: PreTrainedConfig = Mamba2Config(**(LARGE if is_large else SMALL), n_groups=1, tie_word_embeddings=True)
        with torch.device(device):
            lm = TreeLM(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval())
    rows: dict[str, Any] = {}
    for nodes in SIZES:
        step = tree_step(lm, nodes, CONTEXT)
        row: dict[str, Any] = {"launched_us": time_calls(step, device)["p50"]}
        if is_gpu:
            row["captured_us"] = time_graph(step, device)["p50"]
        moved = sum(bytes_moved(lm, batch=1, length=CONTEXT, nodes=nodes).values())
        row |= {"bytes": moved, "bound_us": 1e6 * moved / bandwidth}
        expected = predicted_ms(name, nodes, bandwidth) if is_gpu else None
        row |= {} if expected is None else {"predicted_us": 1e3 * expected["total"]}
        rows[str(nodes)] = row
    key = "captured_us" if is_gpu else "launched_us"
    ratios = {nodes: row[key] / rows["1"][key] for nodes, row in rows.items()}
    return {"model": f"{name}, {details}", "bytes_per_s": bandwidth, "nodes": rows, "over_one_node": ratios, "ok": True}


def lines_of(report: Mapping[str, Any]) -> dict[str, str]:
    """Lay a report out as lines of names and values."""
    device = report["gpu"] or "no GPU was found; the CPU's kernels were checked"
    lines = {"device": device, "all agrees": "yes" if report["ok"] else "no"}
    for name in ("operations", "layers", "texts", "steps"):
        part = report[name]
        rows = part.get("compared", part.get("equal_launched", {}))
        wrong = [key for key, row in rows.items() if not row["ok"]]
        text = part.get("error") or part.get("skipped") or (f"wrong: {', '.join(wrong)}" if wrong else "right")
        lines[name] = f"{text} ({len(rows)} compared, {part.get('seconds', 0):.0f} s)" if rows else str(text)
    for nodes, row in report["steps"].get("nodes", {}).items():
        shown = ", ".join(f"{key.removesuffix('_us')} {value:.0f} us" for key, value in row.items() if key != "bytes")
        lines[f"{nodes} nodes"] = f"{shown}; {report['steps']['over_one_node'][nodes]:.2f} of one node"
    return lines
