"""A change of transformers' own code is noticed: layers are compared when a model is patched, and all by self_check."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.cuda_packages import bind_packages
from helpers.fast_cases import slow_unless
from helpers.tiny_family_models import family_model, matrix
from helpers.tiny_models import tiny_model
from torch import nn

from stree import TreeLM
from stree.kernels import ops
from stree.models import passed_checks
from stree.models.families import family_of, stateful_modules
from stree.models.trimmed import TrimmedLM


@pytest.fixture(autouse=True)
def no_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let no check of another test or process be remembered."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(passed_checks, "_passed", set())


def test_without_a_home_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "~/.cache")  # what ``expanduser`` returns for a user without a home
    monkeypatch.chdir(tmp_path)
    passed_checks.record_passed("0")
    assert passed_checks.has_passed("0") and not list(tmp_path.iterdir())


@pytest.mark.parametrize("family", matrix())
def test_every_family_passes(family: str, caplog: pytest.LogCaptureFixture) -> None:
    TreeLM(family_model(family)).self_check()
    assert "could not be compared" not in caplog.text


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("minimax", torch.float64), ("qwen3_next", torch.bfloat16), ("zamba2", torch.bfloat16)],
    ids=str,
)
def test_other_dtypes_pass(family: str, dtype: torch.dtype) -> None:
    TreeLM(family_model(family, dtype)).self_check()


def mixer_class(family: str) -> type:
    """Return the class of the first stateful module."""
    model = family_model(family)
    return type(stateful_modules(model, family_of(model.config))[0][1])


def altered(module: Any, path: str, change: Callable[[Any], Any]) -> Any:
    """Copy a module, sharing everything but one changed attribute or parameter; a path leads through its parts."""
    copied = copy.copy(module)
    copied.__dict__ |= {"_parameters": dict(module._parameters), "_modules": dict(module._modules)}
    name, _, rest = path.partition(".")
    if rest:
        copied._modules[name] = altered(module._modules[name], rest, change)
    else:
        value = change(getattr(module, name))
        copied._parameters.pop(name, None)
        copied.__dict__[name] = value
    return copied


SCALED = "scaled output"
CHANGES: dict[str, dict[str, Callable[[Any], Any]]] = {
    # By family: attributes that another release could use otherwise in its own forward: skip terms (D), clamps
    # (time_step_limit, allow_neg_eigval), rates and scales.
    "mamba2": {
        "D": torch.zeros_like,
        "time_step_limit": lambda _: (0.0, 0.3),
        "dt_bias": lambda bias: bias * 1.01,
        "norm.weight": lambda weight: weight * 1.001,
    },
    "falcon_h1": {"D": torch.zeros_like, "ssm_in_multiplier": lambda factor: factor * 1.001},
    "jamba": {"D": torch.zeros_like, "A_log": lambda rate: rate + 0.01, "dt_layernorm": lambda _: nn.Identity()},
    "zamba": {"D": torch.zeros_like, "dt_proj_bias": lambda bias: bias + 0.01},
    "qwen3_next": {"A_log": lambda rate: rate + 0.01, "dt_bias": lambda bias: bias + 0.01},
    "olmo_hybrid": {"allow_neg_eigval": lambda _: False, "o_norm.weight": lambda weight: weight * 1.001},
    "kimi_linear": {"b_proj.weight": lambda weight: weight * 1.01},
    "minimax": {"query_decay": lambda decay: decay * 1.01, "norm.weight": lambda weight: weight * 1.001},
    "recurrent_gemma": {
        "rg_lru.recurrent_param": lambda rate: rate + 0.01,
        "rg_lru.input_gate_bias": lambda bias: bias + 0.01,
        "conv_1d.bias": lambda bias: bias + 0.01,
    },
    "lfm2": {"conv.weight": lambda weight: weight * 1.001},
}


@pytest.mark.parametrize(
    ("family", "path"),
    slow_unless(
        lambda family, path: path == [*CHANGES[family]][0],
        [("mamba2", SCALED), *((family, path) for family, changes in CHANGES.items() for path in changes)],
    ),
)
def test_a_forward_that_a_release_has_changed_is_refused_by_name(
    family: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    TreeLM(family_model(family))  # passes, and is remembered
    kind = mixer_class(family)
    own = kind.forward  # type: ignore[attr-defined]

    @functools.wraps(own)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if path != SCALED:
            return own(altered(self, path, CHANGES[family][path]), *args, **kwargs)
        out = own(self, *args, **kwargs)
        return (1.001 * out[0], *out[1:]) if isinstance(out, tuple) else 1.001 * out

    monkeypatch.setattr(kind, "forward", forward)
    model = family_model(family)
    with pytest.raises(NotImplementedError, match=f"{kind.__name__} of transformers .* else than trees would"):
        TreeLM(model)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("family", ["gemma2", "kimi_linear", "mistral", "recurrent_gemma"])
def test_an_attention_that_is_a_little_off_is_noticed(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = ops.attention_step
    monkeypatch.setattr(ops, "attention_step", lambda *args, **kwargs: 1.001 * own(*args, **kwargs))
    with pytest.raises(NotImplementedError, match="Attention of transformers"):
        TreeLM(family_model(family))


ATTENTIONS: dict[str, dict[str, Any]] = {
    # By family: arguments of transformers' attention function, which trees replace; its forwards are run as they are.
    "gemma2": {"softcap": 5.0, "scaling": 0.3},
    "jamba": {"scaling": 0.36},
    "kimi_linear": {"scaling": 0.3},
}


@pytest.mark.parametrize(
    ("family", "name"), [(family, name) for family, changes in ATTENTIONS.items() for name in (SCALED, *changes)]
)
def test_an_attention_function_that_a_release_has_changed_is_noticed(
    family: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    modeling = sys.modules[mixer_class(family).__module__]
    own = modeling.eager_attention_forward

    def attention(*args: Any, **kwargs: Any) -> Any:
        if name != SCALED:
            return own(*args, **{**kwargs, name: ATTENTIONS[family][name]})
        out, weights = own(*args, **kwargs)
        return 1.001 * out, weights

    monkeypatch.setattr(modeling, "eager_attention_forward", attention)
    with pytest.raises(NotImplementedError, match="Attention of transformers .* else than trees would"):
        TreeLM(family_model(family))


def break_scans(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ops.ssd_step
    monkeypatch.setattr(ops, "ssd_step", lambda *args, **kwargs: 0.01 + own(*args, **kwargs))


def test_a_class_that_has_passed_is_compared_again_for_another_release_or_when_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    TreeLM(tiny_model("mamba2"))
    (passed,) = (tmp_path / "stree" / "self_check").iterdir()
    monkeypatch.setattr(passed_checks, "_passed", set())  # as in another process
    break_scans(monkeypatch)
    lm = TreeLM(tiny_model("mamba2"))
    with pytest.raises(NotImplementedError, match="Mamba2Mixer"):
        lm.self_check()
    with monkeypatch.context() as patch, pytest.raises(NotImplementedError, match="Mamba2Mixer of transformers 9.0"):
        patch.setattr(transformers, "__version__", "9.0")
        TreeLM(tiny_model("mamba2"))
    passed.unlink()
    monkeypatch.setattr(passed_checks, "_passed", set())
    with pytest.raises(NotImplementedError, match="Mamba2Mixer"):
        TreeLM(tiny_model("mamba2"))


def changed_file(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + b"#" * (path.name == name))
    passed_checks._hash.cache_clear()


CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BESIDES: dict[str, tuple[torch.device, torch.dtype, Callable[[pytest.MonkeyPatch], object]]] = {
    # What a comparison depends on beside the class: device, dtype, and what is changed.
    "device": (CUDA, torch.float32, lambda patch: None),
    "dtype": (CPU, torch.bfloat16, lambda patch: None),
    "torch": (CPU, torch.float32, lambda patch: patch.setattr(torch, "__version__", "9.0")),
    "triton": (CPU, torch.float32, lambda patch: patch.setattr(passed_checks, "version_of", lambda _: "9.0")),
    "kernels": (CPU, torch.float32, lambda patch: changed_file(patch, "topology.py")),
    "adapters": (CPU, torch.float32, lambda patch: changed_file(patch, "mixer_patch.py")),
}


@pytest.mark.parametrize("name", BESIDES)
def test_a_pass_is_remembered_for_its_device_dtype_releases_and_kernels_only(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, (device, dtype, change) = mixer_class("mamba2"), BESIDES[name]
    before = passed_checks.digest_of(kind, CPU, torch.float32)
    change(monkeypatch)
    try:
        assert before is not None
        assert passed_checks.digest_of(kind, device, dtype) not in (None, before)
    finally:
        passed_checks._hash.cache_clear()


def test_a_pass_is_remembered_for_the_packages_that_served_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = mixer_class("mamba2")
    before = [passed_checks.digest_of(kind, device, torch.float32) for device in (CPU, CUDA)]
    bind_packages(monkeypatch, kind)
    after = [passed_checks.digest_of(kind, device, torch.float32) for device in (CPU, CUDA)]
    assert before[0] == after[0], "on a CPU torch serves it either way"
    assert before[1] != after[1]


def test_a_layer_that_cannot_be_run_alone_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mixer_class("lfm2"), "forward", lambda self, x, new_argument: x)
    lm = TreeLM(family_model("lfm2"))
    assert "Lfm2ShortConv could not be compared with its own forward" in caplog.text
    with pytest.raises(TypeError, match="new_argument"):
        lm.self_check()


@pytest.mark.parametrize("family", slow_unless(("lfm2", "mamba2", "minimax").__contains__, CHANGES))
def test_a_layer_whose_forward_takes_no_float32_is_compared_in_its_own_dtype(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, factor = mixer_class(family), 1.0
    own = kind.forward  # type: ignore[attr-defined]

    @functools.wraps(own)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = own(self, *args, **kwargs)
        first = out[0] if isinstance(out, tuple) else out
        if first.dtype == torch.float32:
            raise AssertionError("this kernel does not support float32")
        return (factor * first, *out[1:]) if isinstance(out, tuple) else factor * first

    monkeypatch.setattr(kind, "forward", forward)
    lm = TreeLM(family_model(family, torch.bfloat16))
    lm.self_check()
    factor = 1.2
    with pytest.raises(NotImplementedError, match=kind.__name__):
        lm.self_check()


def test_a_head_of_some_tokens_passes() -> None:
    TrimmedLM(TreeLM(tiny_model("bamba")), range(50)).self_check()


def test_the_whole_model_s_logits_are_compared() -> None:
    lm = TreeLM(tiny_model("bamba"))
    lm.self_check()
    lm.model.model.embed_tokens.register_forward_hook(lambda _, __, out: out * (1.01 if out.shape[1] == 8 else 1))
    with pytest.raises(RuntimeError, match="trees and the model's own forward disagree: relative error"):
        lm.self_check()


def test_states_that_a_plain_call_has_left_on_modules_are_no_hindrance(caplog: pytest.LogCaptureFixture) -> None:
    model = family_model("recurrent_gemma")
    model(torch.tensor([[1, 2, 3]]), use_cache=True)  # with gradients
    TreeLM(model)
    assert "could not be compared" not in caplog.text


def test_hooks_autocast_and_other_devices_do_not_disturb_the_comparison() -> None:
    model, calls = tiny_model("bamba"), []
    model.model.layers[0].mamba.in_proj.register_forward_hook(lambda *_: calls.append(1))
    before = torch.get_rng_state()
    with torch.device("meta"), torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        TreeLM(model)
    assert not calls and torch.equal(torch.get_rng_state(), before)


def test_layers_that_give_zeros_pass_and_those_that_give_no_numbers_do_not() -> None:
    model = tiny_model("mamba2")
    for value in (0.0, torch.nan):
        nn.init.constant_(model.backbone.layers[0].mixer.out_proj.weight, value)
        if value == 0:
            TreeLM(model).self_check()
    with pytest.raises(NotImplementedError, match="relative error inf"):
        TreeLM(model).self_check()
