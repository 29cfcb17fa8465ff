"""Trees on quantised weights give the greedy text of transformers on the same model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.tiny_family_models import family_model
from transformers import AutoModelForCausalLM

from stree import TreeLM, generate
from stree.drafters import SuffixDrafter
from stree.models.self_check import model_error

PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [3, 4, 2, 9, 11, 3, 4]]
# In blocks of 32 rows and 64 columns, as the kernels of bitsandbytes need them.
WIDE: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 4, "head_dim": 16},
    "qwen3_5_text": {},
    "mamba2": {},
}


def _torchao() -> Any:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    return transformers.TorchAoConfig(quantization.Int8WeightOnlyConfig())


def _bitsandbytes(**arguments: Any) -> Any:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    return transformers.BitsAndBytesConfig(**arguments)


CASES = {
    "torchao-int8": (_torchao, {}, ("qwen3_5_text", "mamba2"), 1e-4),
    # The products of LLM.int8 depend on the number of rows: the largest gap of the logits here is 0.03 of their scale.
    "bitsandbytes-8bit": (_bitsandbytes, {"load_in_8bit": True}, ("qwen3_5_text", "mamba2"), 0.1),
    "bitsandbytes-4bit": (_bitsandbytes, {"load_in_4bit": True}, ("llama",), 0.1),
}


@pytest.mark.parametrize(("kind", "family"), [(kind, family) for kind, case in CASES.items() for family in case[2]])
def test_greedy_text_on_quantised_weights_is_transformers(kind: str, family: str, tmp_path: Path) -> None:
    make, arguments, _, bound = CASES[kind]
    config = make(**arguments)
    family_model(family, **WIDE[family]).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, quantization_config=config, device_map={"": "cpu"}
    )
    plain = [
        model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0].tolist() for prompt in PROMPTS
    ]
    lm = TreeLM(model)
    found = [generate(lm, [prompt], SuffixDrafter(), budget=6, max_new_tokens=12).sequences[0] for prompt in PROMPTS]
    assert found == plain
    assert model_error(lm)[0] < bound


@pytest.mark.parametrize("file", ["config.json", "hf_quant_config.json"])
def test_modelopt_checkpoints_are_refused_before_weights_are_loaded(tmp_path: Path, file: str) -> None:
    family_model("llama").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    path = tmp_path / file
    held = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**held, "quantization_config": {"quant_method": "modelopt"}}))
    with pytest.raises(NotImplementedError, match="NVIDIA's ModelOpt format, .* use the model's bfloat16 upload"):
        TreeLM.from_pretrained(tmp_path, "cpu")
