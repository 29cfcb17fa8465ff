"""MambaInLlama: the authors' layout is loaded, and trees are those of a Llama whose mixers run token by token."""

from __future__ import annotations

import json
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.family_states import Decoding, rebind_float32
from helpers.fast_cases import slow_unless
from helpers.tiny_models import VOCAB, fresh_logits, relative_error
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.models.bamba.modeling_bamba import BambaRMSNormGated

from stree import TreeLM
from stree.models.loading import load_config

pytestmark = pytest.mark.skipif(
    "group_size" not in signature(BambaRMSNormGated).parameters, reason="this transformers has no grouped norm in Bamba"
)
HEADS, DSTATE, SHARED, WIDTH = 4, 8, 16, 32  # heads of C, two of x and of B
SIZES: dict[str, Any] = {
    "d_model": WIDTH, "d_inner": HEADS * DSTATE, "d_xb": SHARED, "intermediate_size": 48, "hidden_act": "silu",
    "n_layer": 4, "attn_layers": [1, 3], "rms_norm_eps": 1e-5,
    "ssm_cfg": {"expand": 1, "ngroups": HEADS, "d_state": DSTATE, "repeat_kv_before_conv": False},
}  # fmt: skip
LLAMA: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 4, "rms_norm_eps": 1e-6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.1,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": [7, 9],
}  # fmt: skip


class GatedNorm(nn.Module):
    """RMSNorm of each head of y silu(z)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HEADS * DSTATE))

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        y = (y * F.silu(z)).view(HEADS, DSTATE)
        return (y / (y.pow(2).mean(1, keepdim=True) + 1e-5).sqrt()).flatten() * self.weight


class Mixer(nn.Module):
    """The paper's mixer, a token after the other: heads of x and B are shared as keys and values are."""

    def __init__(self, repeats_first: bool) -> None:
        super().__init__()
        inner, mixed = HEADS * DSTATE, (3 * HEADS * DSTATE if repeats_first else HEADS * DSTATE + 2 * SHARED)
        self.repeats_first = repeats_first
        self.in_proj = nn.Linear(WIDTH, 2 * inner + 2 * SHARED + HEADS, bias=False)
        self.conv1d: Any = nn.Conv1d(mixed, mixed, 4, groups=mixed)
        self.dt_bias, self.A_log = nn.Parameter(torch.rand(HEADS) * 3 - 2), nn.Parameter(torch.rand(HEADS) * 3 - 3)
        self.D, self.norm = nn.Parameter(torch.randn(HEADS)), GatedNorm()
        self.out_proj = nn.Linear(inner, WIDTH, bias=False)

    def for_every_head(self, shared: Tensor) -> Tensor:
        by_head = shared.view(SHARED // DSTATE, DSTATE)
        return torch.stack([by_head[head * len(by_head) // HEADS] for head in range(HEADS)]).flatten()

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        return torch.stack([self.text(states) for states in hidden_states]), None

    def text(self, states: Tensor) -> Tensor:
        inner, outs = HEADS * DSTATE, []
        recent = [torch.zeros(len(self.conv1d.weight), dtype=states.dtype)] * 4
        state = torch.zeros(HEADS, DSTATE, DSTATE, dtype=states.dtype)
        for token in states:
            z, x, b, c, dt = self.in_proj(token).split([inner, SHARED, SHARED, inner, HEADS])
            if self.repeats_first:
                x, b = self.for_every_head(x), self.for_every_head(b)
            recent = [*recent[1:], torch.cat((x, b, c))]
            convolved = F.silu((torch.stack(recent, 1) * self.conv1d.weight[:, 0]).sum(1) + self.conv1d.bias)
            x, b, c = convolved.split([len(x), len(b), inner])
            if not self.repeats_first:
                x, b = self.for_every_head(x), self.for_every_head(b)
            x, b, c = (part.view(HEADS, DSTATE) for part in (x, b, c))
            step = F.softplus(dt + self.dt_bias)
            decay = (-self.A_log.exp() * step).exp()
            state = decay[:, None, None] * state + step[:, None, None] * x[:, :, None] * b[:, None]
            y = (state * c[:, None]).sum(2) + self.D[:, None] * x
            outs.append(self.out_proj(self.norm(y.flatten(), z)))
        return torch.stack(outs)


def oracle(repeats_first: bool = False, **changes: Any) -> PreTrainedModel:
    """Make a Llama with the mixers in the layers that do not attend."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**LLAMA, **changes}))
    for number, layer in enumerate(model.model.layers):
        if number not in SIZES["attn_layers"]:
            layer.self_attn = Mixer(repeats_first)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.mul_(2.5)
            elif name.endswith("norm.weight"):
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return model.double().eval()


def save(folder: Path, model: Any, file: str = "model.safetensors", **options: Any) -> Path:
    """Write a model in the authors' layout."""
    names = {
        name.replace(".self_attn.", ".mamba." if int(name.split(".")[2]) not in SIZES["attn_layers"] else ".self_attn.")
        if ".layers." in name
        else name: tensor.contiguous()
        for name, tensor in model.state_dict().items()
    }
    if file.endswith("safetensors"):
        save_file(names, folder / file)
    else:
        torch.save(names, folder / file)
    model.config.save_pretrained(folder)
    sizes = {**SIZES, "ssm_cfg": {**SIZES["ssm_cfg"], **options}}
    (folder / "mamba_config.json").write_text(json.dumps(sizes))
    return folder


CASES: list[tuple[str, bool, dict[str, Any]]] = [
    ("model.safetensors", False, {}),
    ("pytorch_model.bin", True, {"tie_word_embeddings": True}),
    ("model.safetensors", False, {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }}),
]  # fmt: skip


@pytest.mark.parametrize(("file", "repeats_first", "changes"), slow_unless(lambda _, __, changes: not changes, CASES))
def test_texts_and_trees_are_those_of_the_mixers_run_token_by_token(
    file: str, repeats_first: bool, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = oracle(repeats_first, **changes)
    folder = save(tmp_path, model, file, repeat_kv_before_conv=repeats_first)
    lm = TreeLM.from_pretrained(folder, dtype="float64")
    assert lm.eos_token_ids == [7, 9] and lm.num_layers == 4
    rebind_float32(monkeypatch)
    decoding = Decoding(model, [11, 4], lm=lm)
    assert decoding.prompt_error() < decoding.tolerance
    for _ in range(2):
        decoding.step([7, 5])
    decoding.score([6, 6])


def test_heads_that_share_x_and_b_in_another_order_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = oracle()
    lm = TreeLM.from_pretrained(save(tmp_path, model), dtype="float64")
    tokens = [5, 9, 33, 7, 2, 60]
    state = lm.new_state(1, 16, 4)
    logits = lm.prefill(state, torch.tensor([tokens]))[0]
    assert relative_error(logits, fresh_logits(model, tokens)[-1]) < 1e-4  # transformers computes states in float32
    monkeypatch.setattr(Mixer, "for_every_head", lambda _, shared: shared.view(-1, DSTATE).repeat(2, 1).flatten())
    assert relative_error(logits, fresh_logits(model, tokens)[-1]) > 1e-2


def test_the_self_check_passes(tmp_path: Path) -> None:
    TreeLM.from_pretrained(save(tmp_path, oracle())).self_check()
    assert load_config(tmp_path).model_type == "bamba"


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"ssm_cfg": {"expand": 1}}, "Mamba-1 in Llama layers is not supported"),
        ({"d_inner": 24}, "d_inner must be ngroups x d_state .* got d_inner 24"),
        ({"ssm_cfg": {**SIZES["ssm_cfg"], "D_has_hdim": True}}, "option D_has_hdim=True"),
        ({"ssm_cfg": {**SIZES["ssm_cfg"], "warp": 2}}, "option warp=2"),
    ],
)
def test_what_bamba_does_not_have_is_refused(sizes: dict[str, Any], message: str, tmp_path: Path) -> None:
    LlamaConfig(**LLAMA).save_pretrained(tmp_path)
    (tmp_path / "mamba_config.json").write_text(json.dumps({**SIZES, **sizes}))
    with pytest.raises(NotImplementedError, match=message):
        TreeLM.from_pretrained(tmp_path)


def test_a_file_of_other_sizes_and_missing_weights_are_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, oracle())
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="has none of model.safetensors"):
        TreeLM.from_pretrained(folder)
    (folder / "mamba_config.json").write_text("{}")
    with pytest.raises(ValueError, match="must name d_inner, d_xb and attn_layers"):
        TreeLM.from_pretrained(folder)
