"""Loading: native mamba-ssm checkpoints equal transformers' models; device maps, dtypes, refused code."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.family_states import Decoding
from helpers.tiny_family_models import VOCAB, family_model
from helpers.tiny_models import tiny_model
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

import stree
from stree import TreeLM
from stree.bench.pair import Pair
from stree.models.loading import load_config

LAYERS, PADDED = 2, 104  # 97 tokens padded to a multiple of 8
MIXER_KEYS = {
    "Mamba1": ["in_proj.weight", "conv1d.weight", "conv1d.bias", "x_proj.weight", "dt_proj.weight", "dt_proj.bias",
               "A_log", "D", "out_proj.weight"],
    "Mamba2": ["in_proj.weight", "conv1d.weight", "conv1d.bias", "dt_bias", "A_log", "D", "norm.weight",
               "out_proj.weight"],
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "Mamba1": {"layer": "Mamba1", "d_state": 6, "dt_rank": 3},
    "Mamba2": {"layer": "Mamba2", "d_state": 16, "headdim": 16, "chunk_size": 8, "dt_limit": [0.0, float("inf")]},
}


def source(kind: str, **changes: Any) -> PreTrainedModel:
    """Make the transformers model that a native checkpoint is written from."""
    if kind == "Mamba1":
        return family_model("mamba", vocab_size=PADDED, tie_word_embeddings=True, **changes)
    return tiny_model("mamba2", vocab_size=PADDED, n_groups=1, tie_word_embeddings=True, **changes)


def native_config(kind: str, **changes: Any) -> dict[str, Any]:
    """Write what mamba-ssm's MambaConfig saves; ``ssm_cfg`` of a Mamba-1 may leave the layer out."""
    options = {name: value for name, value in OPTIONS[kind].items() if name != "layer" or kind == "Mamba2"}
    return {
        "d_model": 32, "d_intermediate": 0, "n_layer": LAYERS, "vocab_size": VOCAB, "ssm_cfg": options,
        "attn_layer_idx": [], "attn_cfg": {}, "rms_norm": True, "residual_in_fp32": True, "fused_add_norm": True,
        "pad_vocab_size_multiple": 8, "tie_embeddings": True, **changes,
    }  # fmt: skip


def native_weights(model: Any, kind: str, has_head: bool = True) -> dict[str, Tensor]:
    """Name a model's weights as mamba-ssm's modules do."""
    weights = {"backbone.embedding.weight": model.backbone.embeddings.weight}
    for number, layer in enumerate(model.backbone.layers):
        weights[f"backbone.layers.{number}.norm.weight"] = layer.norm.weight
        for key in MIXER_KEYS[kind]:
            weights[f"backbone.layers.{number}.mixer.{key}"] = layer.mixer.get_parameter(key)
    weights["backbone.norm_f.weight"] = model.backbone.norm_f.weight
    if has_head:
        weights["lm_head.weight"] = model.lm_head.weight
    return {name: tensor.detach().clone() for name, tensor in weights.items()}


def save(folder: Path, config: dict[str, Any], weights: Any, suffix: str = "bin") -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    if suffix == "bin":
        torch.save(weights, folder / "pytorch_model.bin")
    elif suffix == "safetensors":
        save_file(weights, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("suffix", ["bin", "safetensors"])
@pytest.mark.parametrize("kind", [pytest.param("Mamba1", marks=pytest.mark.slow), "Mamba2"])
def test_a_native_checkpoint_is_the_model_it_was_written_from(kind: str, suffix: str, tmp_path: Path) -> None:
    model = source(kind)
    save(tmp_path, native_config(kind), native_weights(model, kind, has_head=suffix == "bin"), suffix)
    lm = TreeLM.from_pretrained(tmp_path, "cpu")
    text = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14]]
    with torch.no_grad():
        assert torch.equal(lm.model(torch.tensor(text)).logits, model(torch.tensor(text)).logits)
    assert lm.vocab_size == PADDED
    Decoding(model, [10], lm=lm).score([7])
    out = lm.model.generate(torch.tensor(text), custom_generate=stree.custom_generate, max_new_tokens=5)
    assert out.shape == (1, 15), "a native config names no end token"


def test_an_untied_native_head_is_loaded(tmp_path: Path) -> None:
    model = tiny_model("mamba2", vocab_size=PADDED, n_groups=1, tie_word_embeddings=False)
    save(tmp_path, native_config("Mamba2", tie_embeddings=False), native_weights(model, "Mamba2"))
    lm = TreeLM.from_pretrained(tmp_path, "cpu")
    assert torch.equal(lm.model.lm_head.weight, model.lm_head.weight)
    assert not torch.equal(lm.model.lm_head.weight, lm.model.get_input_embeddings().weight)


def test_groups_of_a_native_mamba_2_are_normalised_apart(tmp_path: Path) -> None:
    model = tiny_model("mamba2", vocab_size=PADDED, n_groups=2)
    if not hasattr(model.backbone.layers[0].mixer.norm, "group_size"):
        pytest.skip("this transformers has no grouped norm in Mamba-2")
    options = {**OPTIONS["Mamba2"], "ngroups": 2}
    save(tmp_path, native_config("Mamba2", ssm_cfg=options), native_weights(model, "Mamba2"))
    lm, text = TreeLM.from_pretrained(tmp_path, "cpu"), torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        expected = model.backbone(text)[0] @ lm.model.lm_head.weight.T  # tiny_model unties the head
        assert torch.allclose(lm.model(text).logits, expected, atol=1e-5)


def test_defaults_of_the_published_checkpoints_are_mamba_ssm_s(tmp_path: Path) -> None:
    published = {"d_model": 2560, "n_layer": 64, "vocab_size": 50277, "ssm_cfg": {"layer": "Mamba2"}, "rms_norm": True,
                 "pad_vocab_size_multiple": 16}  # fmt: skip
    config = load_config(save(tmp_path, published, None, "none"))
    sizes = (config.num_heads, config.head_dim, config.state_size, config.n_groups, config.vocab_size, config.expand)
    assert sizes == (80, 64, 128, 1, 50288, 2)
    assert (config.time_step_limit, config.chunk_size, config.layer_norm_epsilon) == ((0.0, float("inf")), 256, 1e-5)
    flags = config.residual_in_fp32, config.tie_word_embeddings, config.use_bias, config.use_conv_bias
    assert flags == (True, True, False, True)
    first = {"d_model": 2560, "n_layer": 64, "vocab_size": 50277, "ssm_cfg": {}, "pad_vocab_size_multiple": 8}
    config = load_config(save(tmp_path, first, None, "none"))
    others = (config.intermediate_size, config.state_size, config.time_step_rank, config.conv_kernel, config.vocab_size)
    assert others == (5120, 16, 160, 4, 50280)


def test_options_of_a_native_mixer_are_taken_over(tmp_path: Path) -> None:
    options = {"layer": "Mamba2", "d_conv": 3, "expand": 4, "bias": True, "conv_bias": False, "headdim": 32,
               "d_state": 48, "ngroups": 2, "chunk_size": 64, "dt_limit": [0.01, 0.2]}  # fmt: skip
    config = load_config(save(tmp_path, native_config("Mamba2", ssm_cfg=options, residual_in_fp32=False), None, "none"))
    mixer = config.conv_kernel, config.expand, config.use_bias, config.use_conv_bias, config.head_dim
    assert mixer == (3, 4, True, False, 32) and not config.residual_in_fp32
    recurrence = config.state_size, config.n_groups, config.chunk_size, tuple(config.time_step_limit)
    assert recurrence == (48, 2, 64, (0.01, 0.2))
    config = load_config(save(tmp_path, native_config("Mamba1", ssm_cfg={"dt_rank": 5, "d_state": 8}), None, "none"))
    assert (config.time_step_rank, config.state_size) == (5, 8)


def ssm(**changes: Any) -> dict[str, Any]:
    return native_config("Mamba2", ssm_cfg={**OPTIONS["Mamba2"], **changes})


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "hybrid": (native_config("Mamba2", attn_layer_idx=[1]), r"native hybrid .*, got attn_layer_idx=\[1\]"),
    "mlp": (native_config("Mamba2", d_intermediate=64), "with an MLP are not supported, got d_intermediate=64"),
    "layer-norm": (native_config("Mamba1", rms_norm=False), "with LayerNorm are not supported, got rms_norm=False"),
    "mamba-3": (ssm(layer="Mamba3"), "native layers must be Mamba1 or Mamba2, got 'Mamba3'"),
    "gate": (ssm(norm_before_gate=True), "norm_before_gate=True of a native Mamba2 is not supported, only False"),
    "no-norm": (ssm(rmsnorm=False), "option rmsnorm=False of a native Mamba2 is not supported, only True"),
    "inner": (ssm(d_ssm=32), "option d_ssm=32 of a native Mamba2 is not supported, only 64"),
    "unknown": (ssm(mimo_rank=4), "option mimo_rank=4 of a native Mamba2 is not supported"),
}  # fmt: skip


@pytest.mark.parametrize(("config", "message"), REFUSED.values(), ids=REFUSED)
def test_a_native_checkpoint_that_cannot_be_mapped_is_refused(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save(tmp_path, config, {})
    with pytest.raises(NotImplementedError, match=message):
        TreeLM.from_pretrained(tmp_path, "cpu")


class Bomb:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return (pytest.fail, ("code of a checkpoint ran",))


LAST = "backbone.layers.1.mixer.A_log"
BROKEN: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "lacks": (
        lambda weights: {n: w for n, w in weights.items() if n != LAST},
        "the native checkpoint lacks backbone.layers.1.mixer.A_log; 1 such",
    ),
    "more": (
        lambda weights: {**weights, "backbone.layers.0.norm2.weight": torch.ones(32)},
        "has backbone.layers.0.norm2.weight, which this architecture does not",
    ),
    "shape": (
        lambda weights: {**weights, "backbone.norm_f.weight": torch.ones(31)},
        r"has backbone.norm_f.weight of shape \[31\], expected \[32\]",
    ),
    "code": (lambda weights: {**weights, "x": Bomb()}, "pytorch_model.bin cannot be read as tensors"),
    "list": (lambda _: [torch.ones(2)], "pytorch_model.bin must hold a dict of tensors, got list"),
}


@pytest.mark.parametrize(("spoil", "message"), BROKEN.values(), ids=BROKEN)
def test_a_native_checkpoint_of_wrong_weights_is_refused(
    spoil: Callable[[dict[str, Tensor]], Any], message: str, tmp_path: Path
) -> None:
    save(tmp_path, native_config("Mamba2"), spoil(native_weights(source("Mamba2"), "Mamba2")))
    with pytest.raises(ValueError, match=message):
        TreeLM.from_pretrained(tmp_path, "cpu")


def test_a_native_checkpoint_needs_weights_and_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, native_config("Mamba2"), None, "none")
    with pytest.raises(ValueError, match="has none of model.safetensors, .*pytorch_model.bin"):
        TreeLM.from_pretrained(tmp_path, "cpu")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    with pytest.raises(NotImplementedError, match="device_map and tp_plan are not supported for native mamba-ssm"):
        TreeLM.from_pretrained(tmp_path, device_map="auto")


@pytest.mark.parametrize("is_native", [True, False], ids=["native", "transformers"])
def test_a_checkpoint_is_loaded_in_the_dtype_asked_for(is_native: bool, tmp_path: Path) -> None:
    model = source("Mamba2").half()
    if is_native:
        save(tmp_path, native_config("Mamba2"), native_weights(model, "Mamba2"))
    else:
        model.save_pretrained(tmp_path)
    for dtype, expected in (
        ("float16", torch.float16), (torch.bfloat16, torch.bfloat16), ("float64", torch.float64),
        ("auto", torch.float32),
    ):  # fmt: skip
        lm = TreeLM.from_pretrained(tmp_path, "cpu", dtype)
        assert lm.dtype == expected
        assert lm.verify(lm.new_state(), stree.TokenTree.chain([4, 5])).isfinite().all()
    with pytest.raises(ValueError, match="float31"):
        TreeLM.from_pretrained(tmp_path, "cpu", "float31")


def test_a_checkpoint_that_would_execute_code_is_refused_unless_allowed(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("raise ArithmeticError('the code ran')\n")
    config = {"model_type": "homemade", "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}}
    save(tmp_path, config, None, "none")
    with pytest.raises(ValueError, match="would execute code of its own; pass trust_remote_code=True if you have read"):
        TreeLM.from_pretrained(tmp_path, "cpu")
    with pytest.raises(ArithmeticError, match="the code ran"):
        TreeLM.from_pretrained(tmp_path, "cpu", trust_remote_code=True)


def test_a_device_map_needs_no_device(tmp_path: Path) -> None:
    source("Mamba2").save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match="give one of a device, a device_map and a tp_plan: got 'cpu', 'auto' and None"
    ):
        TreeLM.from_pretrained(tmp_path, "cpu", device_map="auto")


DEVICE_MAPS: dict[str, Any] = {
    "auto": "auto",
    "one": {"": "cpu"},
    "blocks": {"model.embed_tokens": "cpu", "model": "cpu", "lm_head": "cpu"},
}


@pytest.mark.parametrize("device_map", DEVICE_MAPS.values(), ids=DEVICE_MAPS)
def test_a_device_map_loads_the_same_model(device_map: Any, tmp_path: Path) -> None:
    model = tiny_model("bamba")
    model.save_pretrained(tmp_path)
    Decoding(model, [5], lm=TreeLM.from_pretrained(tmp_path, device_map=device_map)).score([7])


def test_offloaded_layers_are_refused(tmp_path: Path) -> None:
    tiny_model("bamba").save_pretrained(tmp_path)
    places = ["embed_tokens", "layers.0", "layers.2", "final_layernorm", "rotary_emb"]
    device_map = {"lm_head": "cpu", "model.layers.1": "disk", **{f"model.{place}": "cpu" for place in places}}
    with pytest.raises(NotImplementedError, match="offloads layers, which trees cannot use; keep them in memory"):
        TreeLM.from_pretrained(tmp_path, device_map=device_map)


@pytest.mark.parametrize(
    "change", [{"ssm_cfg": {"layer": "Mamba2", "headdim": 24}}, {"ssm_cfg": {"layer": "Mamba2", "headdim": 0}}]
)
def test_a_native_config_that_fits_no_model_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    save(tmp_path, native_config("Mamba2", **change), {})
    with pytest.raises(ValueError, match="no checkpoint that transformers can read"):
        load_config(tmp_path)


def test_a_native_checkpoint_has_a_plain_copy_to_be_measured_beside(tmp_path: Path, tokenizer: Any) -> None:
    model = source("Mamba2")
    save(tmp_path, native_config("Mamba2"), native_weights(model, "Mamba2"))
    tokenizer.save_pretrained(tmp_path)
    pair, text = Pair.load(str(tmp_path), device="cpu"), torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        assert torch.equal(pair.plain(text).logits, model(text).logits)
