"""Lean layers equal transformers' own modules, family by family, and act while a tree is scored and nowhere else."""

from __future__ import annotations

import copy
import functools
import random
import threading
from collections import Counter
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module  # type: ignore[import-untyped]
from tiny_family_models import FAMILIES, family_model
from tiny_models import (
    TOLERANCE,
    as_commit,
    fresh_node_logits,
    random_texts,
    random_tree,
    real_nodes,
    relative_error,
    right_padded,
    tree_error,
)
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHAttention
from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridAttention

from stree import TokenTree, TreeLM
from stree.kernels import dispatch, ops
from stree.kernels.tiles import MAX_NORM_WIDTH
from stree.models import laws, lean, tree_lm
from stree.models.waiting import WaitingSum

GATED = (
    "bailing_hybrid", "bamba", "falcon_h1", "granitemoehybrid", "kimi_linear", "mamba2", "nemotron_h", "olmo_hybrid",
    "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "zamba2",
)  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in GATED if family != "falcon_h1"},
    "falcon_h1-norm-before-gate": ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": True}),
    "falcon_h1-norm-after-gate": ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": False}),
}
ERROR = {torch.float32: 1e-6, torch.bfloat16: 1e-2}  # of the largest value; bfloat16 modules round in between


def gated_norm_of(family: str, changes: dict[str, Any]) -> Any:
    """Find the first gated norm of a family's tiny model."""
    modules = family_model(family, **changes).modules()
    return next(module for module in modules if "RMSNormGated" in type(module).__name__)


@pytest.mark.parametrize("dtype", ERROR, ids=str)
@pytest.mark.parametrize(("family", "changes"), CASES.values(), ids=CASES)
def test_a_gated_norm_in_one_launch_equals_the_familys_own(
    family: str, changes: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    norm = gated_norm_of(family, changes).to(dtype)
    channels, draw = norm.weight.shape[0], torch.Generator().manual_seed(0)
    x, gate = (torch.randn(6, 2 * channels, generator=draw).to(dtype)[:, :channels] for _ in range(2))
    monkeypatch.setattr(dispatch, "has_triton", lambda op, *_: op in dispatch.TRITON)
    lean.gated_norm(norm, x, gate)  # what a class computes is found out once, by running a small copy
    monkeypatch.setattr(type(norm), "forward", refuse)
    ours = lean.gated_norm(norm, x, gate)
    monkeypatch.undo()
    with torch.no_grad():
        theirs = norm(x[None], gate[None])[0] if "FalconH1" in type(norm).__name__ else norm(x, gate)
    assert ours.dtype == theirs.dtype
    assert float((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max()) < ERROR[dtype]


class WholeRows(torch.nn.Module):
    """A gated norm as transformers 5.17 has it, which names no groups."""

    def __init__(self, size: int, power: float = 1.0) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = torch.nn.Parameter(torch.linspace(0.5, 2, size)), 1e-3
        self.power = power

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        x = hidden_states * torch.nn.functional.silu(gate) ** self.power
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


def test_a_gated_norm_that_names_no_groups_is_known_by_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    class Squared(WholeRows):
        """Another law under the same names."""

    x, gate = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(dispatch, "has_triton", lambda op, *_: op in dispatch.TRITON)
    norm, other = WholeRows(16), Squared(16, 2.0)
    with torch.no_grad():
        expected, kept = norm(x, gate), other(x, gate)
        assert torch.equal(lean.gated_norm(other, x, gate), kept)
        lean.gated_norm(norm, x, gate)
        monkeypatch.setattr(WholeRows, "forward", refuse)
        torch.testing.assert_close(lean.gated_norm(norm, x, gate), expected)


def refuse(*_: Any, **__: Any) -> Tensor:
    """Stand for a module's forward that must not run."""
    raise AssertionError("the module's own forward ran")


def test_elsewhere_the_familys_own_module_runs() -> None:
    norm = gated_norm_of("bamba", {})
    x, gate = torch.randn(2, 3, norm.weight.shape[0]), torch.randn(2, 3, norm.weight.shape[0])
    with torch.no_grad():
        assert torch.equal(lean.gated_norm(norm, x, gate), norm(x, gate))


LEAN_OPS = ("rms_norm", "rms_norm_add", "gated_activation", "rotary", "experts")
WITH_EXPERTS = {
    "bailing_hybrid", "granitemoehybrid", "jamba", "kimi_linear", "lfm2_moe", "minimax", "nemotron_h",
    "qwen3_5_moe_text", "qwen3_next",
}  # fmt: skip
# What these families have none of that is known: some have no feed-forwards, or attention without positions.
WITHOUT = {
    "bailing_hybrid": {"rotary"},  # in pairs
    "falcon_mamba": {"rotary"},
    "gemma2": {"rms_norm_add"},  # normed before it is added
    "gemma3_text": {"rms_norm_add"},
    "jamba": {"rotary"},
    "kimi_linear": {"rotary"},
    "lfm3": {"rms_norm_add"},
    "mamba": {"rotary"},
    "mamba2": {"rotary", "gated_activation"},
    "minimax": {"gated_activation"},
    "nemotron_h": {"rotary"},
    "zamba": {"rotary"},
    "zamba2": {"gated_activation"},
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Let "auto" mean Triton for lean operations; count those that are asked for."""
    counts: Counter[str] = Counter()

    def counted(name: str) -> Any:
        real = getattr(ops, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return real(*args, **kwargs)

        return run

    for name in LEAN_OPS:
        monkeypatch.setattr(ops, name, counted(name))
    for module in (dispatch, tree_lm):
        monkeypatch.setattr(module, "has_triton", lambda op, *_: op in LEAN_OPS)
    return counts


def verified(model: Any, *, is_lean: bool, seed: int = 0) -> tuple[Tensor, list[list[int]], TokenTree]:
    """Verify a tree, commit a path and verify another: its logits, the texts before it, and the tree."""
    rng = random.Random(seed)
    lm = TreeLM(copy.deepcopy(model))
    lm.is_lean = is_lean
    texts = random_texts(rng, [9, 7])
    state = lm.new_state(2, 32, 6)
    lm.prefill(state, *right_padded(texts))
    first, tree = random_tree(rng, [5, 5]), random_tree(rng, [6, 4], 6)
    lm.verify(state, first)
    lm.commit(state, *as_commit([[0], [0]]))
    texts = [[*text, int(first.tokens[row, 0])] for row, text in enumerate(texts)]
    return lm.verify(state, tree), texts, tree


@pytest.mark.parametrize("family", FAMILIES)
def test_lean_layers_change_no_logits_of_a_familys_tree(family: str, launched: Counter[str]) -> None:
    model = family_model(family)
    plain, texts, tree = verified(model, is_lean=False)
    assert not any(launched[name] for name in ("rms_norm", "rms_norm_add", "rotary", "experts"))
    launched.clear()
    logits, _, _ = verified(model, is_lean=True)
    kept = tree.parents.ge(0) | (torch.arange(tree.parents.shape[1]) == 0)
    assert relative_error(logits[kept], plain[kept]) < 2e-5
    expected = set(LEAN_OPS) - WITHOUT.get(family, set()) - (set() if family in WITH_EXPERTS else {"experts"})
    assert {name for name in LEAN_OPS if launched[name]} == expected
    # Lean or not, the float64 oracle is as near.
    oracle = family_model(family, torch.float64)
    errors = [tree_error(oracle, texts, tree, found.double()) for found in (plain, logits)]
    assert errors[1] < max(4 * errors[0], 1e-6)


@pytest.mark.parametrize("family", ["gemma", "granitemoehybrid", "qwen3_next", "mamba2"])
@pytest.mark.parametrize("broken", ["offset", "factor", "activation", "rotary", "experts"])
def test_a_wrong_fact_is_seen_in_the_logits(
    family: str, broken: str, launched: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = family_model(family)
    plain, _, tree = verified(model, is_lean=False)
    real = {name: getattr(ops, name) for name in LEAN_OPS}
    if broken == "offset":
        monkeypatch.setattr(ops, "rms_norm", lambda *a, offset, **k: real["rms_norm"](*a, offset=1 - offset, **k))
    elif broken == "factor":
        monkeypatch.setattr(ops, "rms_norm_add", lambda *a, scale, **k: real["rms_norm_add"](*a, scale=1.01, **k))
        if family == "granitemoehybrid":
            assert model.config.residual_multiplier != 1.01
    elif broken == "activation":
        monkeypatch.setattr(ops, "gated_activation", lambda gate, up, **k: gate if up is None else gate * up)
    elif broken == "experts":
        monkeypatch.setattr(ops, "experts", lambda x, index, *a, **k: real["experts"](x, index.flip(1), *a, **k))
    else:
        monkeypatch.setattr(ops, "rotary", lambda q, k, *_: (q, k))
    logits, _, _ = verified(model, is_lean=True)
    kept = tree.parents.ge(0) | (torch.arange(tree.parents.shape[1]) == 0)
    has_it = {"activation": "gated_activation", "rotary": "rotary"}.get(broken) not in WITHOUT.get(family, set())
    has_it = has_it and (broken != "experts" or family in WITH_EXPERTS)
    assert (relative_error(logits[kept], plain[kept]) > 1e-4) == has_it


@pytest.mark.parametrize("family", FAMILIES)
def test_a_grafted_model_runs_its_own_code_in_every_other_call(family: str, launched: Counter[str]) -> None:
    model = family_model(family)
    grafted = TreeLM(copy.deepcopy(model)).model
    tokens = torch.arange(9)[None]
    with torch.no_grad():
        assert torch.equal(grafted(tokens, use_cache=False).logits, model(tokens, use_cache=False).logits)
    assert not launched


@pytest.mark.parametrize("family", ["bamba", "falcon_h1", "mamba2", "qwen3_5_text"])  # without experts near a tie
def test_half_precision_stays_as_near_to_float64_as_without(
    family: str, launched: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in LEAN_OPS:  # the interpreter cuts bfloat16 off instead of rounding it
        monkeypatch.setattr(ops, name, functools.partial(getattr(ops, name), backend="reference"))
    squares = [0.0, 0.0]
    for seed in range(4):
        model = family_model(family, torch.bfloat16, seed)
        oracle = copy.deepcopy(model).double()
        for place, is_lean in enumerate((False, True)):
            logits, texts, tree = verified(model, is_lean=is_lean, seed=seed)
            for row, text in enumerate(texts):
                exact = fresh_node_logits(oracle, text, tree, row)
                squares[place] += float((logits[row, real_nodes(tree, row)] - exact).square().mean())
    assert squares[1] < 1.1 * squares[0]  # 0.8 to 1.04: a launch rounds once where several rounded each


def test_a_failing_forward_leaves_no_layer_lean(launched: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lm = TreeLM(family_model("llama"))
    state = lm.new_state(1, 32, 4)
    lm.prefill(state, torch.arange(5)[None])
    with monkeypatch.context() as patch:
        patch.setattr(ops, "attention_step", refuse)
        with pytest.raises(AssertionError, match="the module's own forward ran"):
            lm.verify(state, TokenTree.chain([1, 2]))
    launched.clear()
    with torch.no_grad():
        lm.model(torch.arange(5)[None], use_cache=False)
    assert not launched


def test_another_thread_is_not_scoring() -> None:
    seen: list[bool] = []
    with lean.scoring(True):
        thread = threading.Thread(target=lambda: seen.append(lean._is_scoring.get()))
        thread.start()
        thread.join()
        assert lean._is_scoring.get()
    assert seen == [False] and not lean._is_scoring.get()


def test_a_model_can_be_grafted_again_and_copied(launched: Counter[str]) -> None:
    model = family_model("bamba")
    once = TreeLM(model)
    again = TreeLM(copy.deepcopy(once.model))
    twice = TreeLM(once.model)
    norms: list[Any] = [
        next(part for part in lm.model.modules() if hasattr(part, "lean_facts")) for lm in (again, twice)
    ]
    assert all(norm.forward.args == (norm, None) for norm in norms)  # itself, and no forward before ours


def test_a_forward_that_was_put_on_a_module_before_stays_its_own(launched: Counter[str]) -> None:
    norm: Any = LlamaRMSNorm(8)
    norm.forward = lambda x: LlamaRMSNorm.forward(norm, x) + 1
    lean.graft_lean(nn.Sequential(norm))
    assert "lean_facts" not in norm.__dict__
    with lean.scoring(True), torch.no_grad():
        assert torch.equal(norm(torch.ones(1, 8)), LlamaRMSNorm.forward(norm, torch.ones(1, 8)) + 1)
    assert not launched


def test_accelerates_forward_of_a_module_runs_in_plain_calls_alone(launched: Counter[str]) -> None:
    norm = LlamaRMSNorm(8)
    hook = AlignDevicesHook(execution_device="cpu")
    add_hook_to_module(norm, hook)
    calls: list[Any] = []

    def post_forward(_: Any, output: Tensor) -> Tensor:
        calls.append(output)
        return output

    hook.post_forward = post_forward
    for _ in range(2):
        lean.graft_lean(nn.Sequential(norm))
        norm(torch.ones(1, 8))
    assert len(calls) == 2
    with lean.scoring(True):
        norm(torch.ones(1, 8))
    assert len(calls) == 2 and launched["rms_norm"] == 1


def test_a_norm_whose_weights_are_fetched_for_each_call_runs_its_own_forward(launched: Counter[str]) -> None:
    norm, x = LlamaRMSNorm(8), torch.arange(8.0)[None]
    expected = 3 * norm(x)
    hook = AlignDevicesHook(execution_device="cpu", offload=True, weights_map={"weight": torch.full((8,), 3.0)})
    add_hook_to_module(norm, hook)
    assert norm.weight.device.type == "meta"
    lean.graft_lean(nn.Sequential(norm))
    with lean.scoring(True), torch.no_grad():
        assert torch.allclose(norm(x), expected)
    assert "lean_facts" in norm.__dict__ and not launched


def test_a_gated_norm_that_was_patched_runs_its_own_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "has_triton", lambda *_: True)
    norm = gated_norm_of("bamba", {})
    norm.forward = lambda x, gate: x + gate
    x = torch.ones(2, norm.weight.shape[0])
    assert torch.equal(lean.gated_norm(norm, x, x), x + x)


def test_a_gated_norm_with_a_hook_runs_its_own_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "has_triton", lambda *_: True)
    norm = gated_norm_of("bamba", {})
    norm.register_forward_hook(lambda _, __, y: 2 * y)
    x = torch.randn(2, norm.weight.shape[0])
    with torch.no_grad():
        assert torch.equal(lean.gated_norm(norm, x, x), 2 * norm.forward(x, x))


@pytest.mark.parametrize("family", ["jamba", "llama"])
def test_trees_run_the_hooks_of_activations(family: str, launched: Counter[str]) -> None:
    model = family_model(family)
    lm, tree = TreeLM(copy.deepcopy(model)), random_tree(random.Random(0), [6])
    for module in (*model.modules(), *lm.model.modules()):
        if isinstance(getattr(module, "act_fn", None), nn.Module):
            module.act_fn.register_forward_hook(lambda _, __, y: y * y)
    assert tree_error(model, [[]], tree, lm.verify(lm.new_state(1, 8, 8), tree)) < TOLERANCE[torch.float32]


def shift(_: Any, __: Any, output: Tensor) -> None:
    assert isinstance(output, Tensor)
    output += 1  # in place, and nothing is returned


@pytest.mark.parametrize("family", ["llama", "mamba2"])
def test_hooks_of_layers_are_given_tensors(family: str, launched: Counter[str]) -> None:
    model = family_model(family)
    lm, tree = TreeLM(copy.deepcopy(model)), random_tree(random.Random(0), [6])
    for layer in (*model.base_model.layers, *lm.model.base_model.layers):
        layer.register_forward_hook(shift)
    assert tree_error(model, [[]], tree, lm.verify(lm.new_state(1, 8, 8), tree)) < TOLERANCE[torch.float32]
    assert launched["rms_norm"] and not launched["rms_norm_add"]


def test_a_hook_of_a_module_that_was_inserted_later_is_given_tensors(launched: Counter[str]) -> None:
    class Around(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.layer(*args, **kwargs)

    model = family_model("llama")
    lm, tree = TreeLM(copy.deepcopy(model)), random_tree(random.Random(0), [6])
    for layers in (model.model.layers, lm.model.model.layers):
        layers[0] = Around(layers[0])
        layers[0].register_forward_hook(shift)
    assert tree_error(model, [[]], tree, lm.verify(lm.new_state(1, 8, 8), tree)) < TOLERANCE[torch.float32]
    assert launched["rms_norm"] and not launched["rms_norm_add"]


class TwiceWeighted(LlamaRMSNorm):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * super().forward(x)  # type: ignore[no-any-return]


class Centred(LlamaRMSNorm):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(-1, keepdim=True))  # type: ignore[no-any-return]


class Widening(LlamaRMSNorm):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float()  # type: ignore[no-any-return]


class Doubled(LlamaMLP):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [TwiceWeighted, Centred, Widening, nn.LayerNorm, nn.RMSNorm])
def test_norms_that_do_something_else_keep_their_own_forward(kind: type) -> None:
    assert laws.norm_of_rows(kind(8)) is None
    assert laws.norm_of_rows(LlamaRMSNorm(8)) == laws.Norm("variance_epsilon", 0.0)


def test_a_norm_too_wide_for_its_kernel_keeps_its_own_forward() -> None:
    norms = [LlamaRMSNorm(width) for width in (MAX_NORM_WIDTH, MAX_NORM_WIDTH + 1)]
    lean.graft_lean(nn.Sequential(*norms))
    assert ["lean_facts" in norm.__dict__ for norm in norms] == [True, False]


def test_feed_forwards_that_do_something_else_keep_their_own_forward() -> None:
    config = family_model("llama").config
    assert laws.feed_forward_of(LlamaMLP(config)) is not None
    assert laws.feed_forward_of(Doubled(config)) is None
    exact = LlamaMLP(config)
    exact.act_fn = ACT2FN["gelu"]
    lean.graft_lean(nn.Sequential(exact))
    assert "lean_facts" not in exact.__dict__ and laws.activation_of(ACT2FN["gelu"]) is None
    scaled = next(module for module in family_model("falcon_h1").modules() if hasattr(module, laws.DOWN_FACTOR))
    assert laws.feed_forward_of(scaled) is not None
    assert laws.activation_of(ACT2FN["gelu_pytorch_tanh"]) == "gelu_tanh" and laws.activation_of(nn.SiLU()) == "silu"


class Learned(nn.SiLU):
    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.ones(1, device="meta"))  # as on a device that copies on the CPU do not share


def test_activations_with_weights_and_other_default_devices_do_not_disturb_grafting() -> None:
    config = family_model("llama").config
    learned = LlamaMLP(config)
    learned.act_fn = Learned()
    assert laws.feed_forward_of(learned) is None and laws.activation_of(Learned()) is None
    for known in (laws._norms, laws._feed_forwards, laws._experts, laws._rotaries):
        known.clear()
    model = family_model("granitemoehybrid")
    lean.with_lean_rotary.cache_clear()
    with torch.device("meta"):
        lean.graft_lean(model)
        assert lean.with_lean_rotary(LlamaAttention.forward) is not LlamaAttention.forward
    names = {type(module).__name__ for module in model.modules() if hasattr(module, "lean_facts")}
    assert names == {"GraniteMoeHybridRMSNorm", "GraniteMoeHybridMLP", "GraniteMoeHybridExperts"}


def test_experts_that_do_something_else_keep_their_own_forward(launched: Counter[str]) -> None:
    (experts,) = (
        m for m in family_model("qwen3_next").model.layers[0].mlp.modules() if type(m).__name__[-7:] == "Experts"
    )
    assert laws.experts_of(experts) == laws.Experts("gate_up_proj", True)

    class Halved(type(experts)):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
            return super().forward(hidden_states, top_k_index, top_k_weights / 2)

    class Widened(type(experts)):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
            return super().forward(hidden_states, top_k_index, top_k_weights).float()

    for kind in (Halved, Widened):
        experts.__class__ = kind
        assert laws.experts_of(experts) is None
    experts.__class__ = Halved.__mro__[1]
    lean.graft_lean(nn.Sequential(experts))
    experts._is_expert_parallel = True  # only a part of the experts stands here
    x, index = torch.randn(3, 32), torch.tensor([[0, 1], [2, 3], [1, 2]])
    with lean.scoring(True), torch.no_grad():
        experts(x, index, torch.ones(3, 2))
        experts._is_expert_parallel = False
        experts(x.double(), index, torch.ones(3, 2))  # which their weights are not
        assert not launched
        experts(x, index, torch.ones(3, 2))
    assert launched["experts"] == 1


def test_rotations_that_do_something_else_keep_their_own_function() -> None:
    def in_pairs(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        turned = [torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) for x in (q, k)]
        return q * cos[:, None] + turned[0] * sin[:, None], k * cos[:, None] + turned[1] * sin[:, None]

    assert laws.keeps_rotary_dtype(in_pairs) is None
    assert lean.with_lean_rotary(NemotronHAttention.forward) is NemotronHAttention.forward
    own = LlamaAttention.forward
    assert lean.with_lean_rotary(own) is not own and lean.with_lean_rotary(own).__code__ == own.__code__


def test_a_lean_forward_and_the_one_that_it_was_made_of_can_both_be_compiled() -> None:
    names: dict[str, Any] = {"apply_rotary_pos_emb": LlamaAttention.forward.__globals__["apply_rotary_pos_emb"]}
    exec("def forward(q, k, cos, sin, *, by=2):\n    return apply_rotary_pos_emb(by * q, k, cos, sin)", names)
    forwards = names["forward"], lean.with_lean_rotary(names["forward"])
    q, angles, found = torch.randn(1, 2, 3, 8), torch.randn(1, 3, 8), []

    def both() -> None:
        for forward in forwards:
            torch._dynamo.graph_break()
            found.append(forward(q, q, angles, angles)[0])

    torch.compile(both, backend="eager")()
    assert found[0].equal(found[1]) and found[0].equal(forwards[0](q, q, angles, angles)[0])


@pytest.mark.parametrize(("attention", "keeps"), [(LlamaAttention, False), (OlmoHybridAttention, True)])
def test_angles_that_are_wider_than_queries_widen_them_only_where_the_family_does(
    attention: Any, keeps: bool, launched: Counter[str]
) -> None:
    rotary = lean.with_lean_rotary(attention.forward).__globals__["apply_rotary_pos_emb"]
    q, angles = torch.ones(1, 2, 3, 8, dtype=torch.bfloat16), torch.ones(1, 3, 8)
    with lean.scoring(True):
        turned, _ = rotary(q, q, angles, angles)
    assert (turned.dtype == torch.bfloat16) == keeps and launched["rotary"] == keeps


def test_queries_and_angles_of_another_layout_are_rotated_by_the_familys_own_function(launched: Counter[str]) -> None:
    own = LlamaAttention.forward.__globals__["apply_rotary_pos_emb"]
    rotary = lean.with_lean_rotary(LlamaAttention.forward).__globals__["apply_rotary_pos_emb"]
    q, cos, sin = (
        torch.randn(1, 3, *sizes, generator=torch.Generator().manual_seed(0)) for sizes in ((3, 8), (8,), (8,))
    )
    with lean.scoring(True):
        for given, named in (((q, q, cos, sin), {"unsqueeze_dim": 2}), ((q[0], q[0], cos[0], sin[0]), {})):
            assert torch.equal(rotary(*given, **named)[0], own(*given, **named)[0])
    assert not launched


def test_a_norm_whose_weights_are_wider_than_its_rows_keeps_its_own_forward(launched: Counter[str]) -> None:
    norm = LlamaRMSNorm(8)
    lean.graft_lean(nn.Sequential(norm))
    with lean.scoring(True), torch.no_grad():
        assert norm(torch.ones(1, 8, dtype=torch.bfloat16)).dtype == torch.float32
    assert not launched


def test_only_tensors_of_a_scored_tree_wait(launched: Counter[str]) -> None:
    x = torch.ones(1, 8)
    assert lean.waiting(x) is x
    with lean.scoring(True):
        assert isinstance(lean.waiting(x), WaitingSum) and lean.waiting("rest") == "rest"
        first, rest = lean.waiting((x, None))
        assert isinstance(first, WaitingSum) and rest is None
