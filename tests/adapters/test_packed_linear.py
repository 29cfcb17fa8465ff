"""Linear layers on packed weights against float64, through changes of weight, dtype and module."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.calls import together
from helpers.tiny_models import tiny_model
from torch import Tensor, nn

import stree
from stree.models import packed_linear
from stree.models.packed_linear import pack_linears


@pytest.fixture
def onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply as with several threads on a processor that is not Intel's."""
    monkeypatch.setattr(packed_linear, "_mkl_rows", lambda: 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)


def _error(layer: nn.Linear, x: Tensor) -> float:
    wanted = x.double() @ layer.weight.double().T
    if layer.bias is not None:
        wanted += layer.bias.double()
    with torch.no_grad():
        return float((layer(x).double() - wanted).abs().max() / wanted.abs().max())


def _packed(bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    layer = nn.Linear(48, 35, bias=bias, dtype=dtype)
    pack_linears(layer)
    return layer


@pytest.mark.parametrize("shape", [(48,), (1, 1, 48), (2, 1, 48), (3, 48), (4, 48), (2, 3, 5, 48), (0, 48)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("mkl_rows", "threads"), [(0, 1), (0, 3), (3, 1)], ids=["numba", "oneDNN", "MKL to 3 rows"])
def test_products_of_any_shape(
    shape: tuple[int, ...], bias: bool, mkl_rows: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_linear, "_mkl_rows", lambda: mkl_rows)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(packed_linear, "LARGE", 0)
    layer, x = _packed(bias), torch.randn(shape)
    if x.numel():
        assert _error(layer, x) < 1e-5
        assert _error(_packed(bias, torch.bfloat16), x.bfloat16()) < 1e-2
    with torch.no_grad():
        assert layer(x).shape == (*shape[:-1], 35)


@pytest.mark.parametrize("width", [24, 96])  # half a row of the weight, and two
def test_rows_that_are_not_as_wide_as_the_weight_are_refused_by_torch(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_linear, "_mkl_rows", lambda: 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    with torch.no_grad(), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        _packed()(torch.randn(1, width))


@pytest.mark.parametrize("rows", [1, 3, 5, 16, 17, 40])
@pytest.mark.parametrize("bias", [True, False])
def test_products_in_bfloat16_that_onednn_does_not_pack(rows: int, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "_onednn_packs", lambda dtype: dtype == torch.float32)
    monkeypatch.setattr(packed_linear, "PIECE", 480)  # ten of 35 outputs
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
    layer = _packed(bias, torch.bfloat16)
    monkeypatch.setattr(torch.nn.functional, "linear", _only_float32)
    assert _error(layer, torch.randn(rows, 48).bfloat16()) < 2**-8


def _only_float32(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    assert x.dtype == weight.dtype == torch.float32
    product = x @ weight.T
    return product if bias is None else product + bias


def _scale(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.mul_(2)


def _replace(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(layer.weight.detach() * 3)


def _replace_data(layer: nn.Linear) -> None:
    layer.weight.data = layer.weight.data * 3


def _add_to_data(layer: nn.Linear) -> None:  # as peft merges an adapter
    layer.weight.data += 0.1 * torch.randn_like(layer.weight)


@pytest.mark.parametrize("rows", [4, 40])
@pytest.mark.parametrize("change", [_scale, _replace, _replace_data, _add_to_data])
def test_a_changed_weight_is_packed_again(change: Callable[[nn.Linear], None], rows: int) -> None:
    for dtype, most in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        layer, x = _packed(dtype=dtype), torch.randn(rows, 48, dtype=dtype)
        assert _error(layer, x) < most
        change(layer)
        assert _error(layer, x) < most


def test_a_weight_that_would_take_the_memory_of_the_packed_one_is_packed() -> None:
    layer, x = _packed(), torch.randn(40, 48)
    for _ in range(8):
        layer.weight = None  # type: ignore[assignment]
        layer.weight = nn.Parameter(torch.randn(35, 48))
        assert _error(layer, x) < 1e-5


def _load(layer: nn.Linear) -> None:
    layer.load_state_dict({name: -weight for name, weight in layer.state_dict().items()})


def _optimize(layer: nn.Linear) -> None:
    layer.weight.grad = torch.ones_like(layer.weight)
    torch.optim.SGD([layer.weight], lr=0.5).step()


@pytest.mark.parametrize("rows", [4, 40])
def test_threads_never_multiply_by_a_weight_that_has_changed(rows: int) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(512, 512, bias=False), torch.randn(rows, 512)
    pack_linears(layer)
    for round_number in range(24):
        for error in together(lambda _: _error(layer, x), 6):
            assert error < 1e-5
        (_load, _optimize, _scale)[round_number % 3](layer)


def test_a_weight_of_inference_mode_is_not_packed_since_writes_to_it_are_not_counted() -> None:
    with torch.inference_mode():
        layer = _packed()
        assert _error(layer, torch.randn(4, 48)) < 1e-5
        layer.weight.mul_(2)
        assert _error(layer, torch.randn(4, 48)) < 1e-5


def test_another_weight_in_the_same_memory_is_packed_when_it_was_written_to_as_often() -> None:
    layer, x = _packed(), torch.randn(40, 48)
    _scale(layer)
    assert _error(layer, x) < 1e-5
    writes = layer.weight._version
    layer.weight = nn.Parameter(layer.weight.data)
    while layer.weight._version < writes:
        _scale(layer)
    assert _error(layer, x) < 1e-5


@pytest.mark.slow
@pytest.mark.usefixtures("onednn")
def test_products_are_those_of_packed_weights_whether_compiled_or_not() -> None:
    lm = stree.TreeLM(tiny_model("mamba2", torch.float32, num_hidden_layers=1))
    lm.compile()
    state = lm.new_state(1, 16, 2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as prefilled:
        lm.prefill(state, torch.tensor([[1, 2, 3]]))
    tree = stree.TokenTree.chain([1, 2])
    lm.verify(state, tree)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as verified:
        lm.verify(state, tree)
    for profile in (prefilled, verified):
        names = {event.key.rpartition(":")[2] for event in profile.key_averages()}
        assert "_linear_pointwise" in names and not {"linear", "addmm", "mm"} & names


@pytest.mark.usefixtures("onednn")
@pytest.mark.parametrize(
    ("least", "free", "packs"), [(0, 1 << 30, True), (0, 10_000, False), (1 << 20, 1 << 30, False)]
)
def test_eager_steps_pack_large_weights_where_memory_is_free(
    least: int, free: int, packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_linear, "LARGE", least)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=free))
    model = tiny_model("mamba2", torch.float32)
    lm = stree.TreeLM(model)
    state = lm.new_state(1, 16, 2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        logits = lm.prefill(state, torch.tensor([[1, 2, 3]]))
    assert any("_linear_pointwise" in event.key for event in profile.key_averages()) == packs
    with torch.no_grad():
        expected = lm.release()(torch.tensor([[1, 2, 3]])).logits[:, -1]
    torch.testing.assert_close(logits, expected)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize(("mkl_rows", "threads", "stored"), [(0, 1, True), (0, 2, True), (0, 3, False), (3, 1, False)])
def test_eager_steps_multiply_few_rows_by_small_weights_with_numba(
    mkl_rows: int, threads: int, stored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_linear, "_mkl_rows", lambda: mkl_rows)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    lm = stree.TreeLM(tiny_model("mamba2", torch.float32))
    state, prompt = lm.new_state(1, 64, 17), torch.tensor([[1, 2, 3]])
    runs: dict[str, Callable[[], Any]] = {
        "prompt": lambda: lm.prefill(state, prompt),
        "few": lambda: lm.verify(state, stree.TokenTree.chain([1] * 16)),
        "many": lambda: lm.verify(state, stree.TokenTree.chain([1] * 17)),
        "plain call": lambda: lm.model(prompt),
    }
    for name, run in runs.items():
        with torch.no_grad(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            run()
        by_torch = any(event.key == "aten::linear" for event in profile.key_averages())
        assert by_torch != (stored and name == "few"), name


@pytest.mark.parametrize(("processor", "rows"), [("Intel Xeon", 3), ("AMD EPYC", 0)])
def test_few_rows_run_on_the_weight_as_stored_on_an_intel_processor(
    processor: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"cpu_name": processor})
    monkeypatch.setattr(packed_linear, "_mkl_rows", packed_linear._mkl_rows.__wrapped__)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    layer = _packed(bias=False)
    assert [_reads_stored_weight(layer, count) for count in (1, 3, 4)] == [count <= rows for count in (1, 3, 4)]


@pytest.mark.parametrize(("avx512", "threads", "most"), [(True, 1, 4), (True, 2, 0), (False, 2, 16), (False, 3, 0)])
def test_few_rows_run_on_the_weight_as_stored_on_few_threads(
    avx512: bool, threads: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_linear, "_onednn_packs", lambda dtype: avx512 or dtype == torch.float32)
    monkeypatch.setattr(packed_linear, "_mkl_rows", lambda: 0)
    monkeypatch.setattr(packed_linear, "LARGE", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    layer = _packed(bias=False)
    assert [_reads_stored_weight(layer, count) for count in (1, 4, 5, 16, 17)] == [
        count <= most for count in (1, 4, 5, 16, 17)
    ]


def _reads_stored_weight(layer: nn.Linear, rows: int) -> bool:
    with torch.no_grad(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        layer(torch.randn(rows, 48))
    return not any("_linear_pointwise" in event.key for event in profile.key_averages())


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_pack_their_own_weight(duplicate: Callable[[nn.Linear], nn.Linear]) -> None:
    layer, x = _packed(), torch.randn(4, 48)
    assert _error(layer, x) < 1e-5
    other = duplicate(layer)
    _scale(other)
    assert _error(other, x) < 1e-5 and _error(layer, x) < 1e-5


def test_another_dtype_or_a_gradient_runs_the_layer_itself() -> None:
    layer, x = _packed(), torch.randn(4, 48)
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    assert _error(layer.double(), x.double()) < 1e-12
    with torch.no_grad(), pytest.raises(RuntimeError, match="dtype"):
        layer(x)


@pytest.mark.usefixtures("onednn")
def test_a_second_tree_lm_leaves_the_packed_weights_of_a_model() -> None:
    first = stree.TreeLM(tiny_model("mamba2", torch.float32))
    first.compile()
    lm = stree.TreeLM(first.model)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        lm.prefill(lm.new_state(1, 16, 2), torch.tensor([[1, 2, 3]]))
    assert any("_linear_pointwise" in event.key for event in profile.key_averages())


def test_release_takes_packed_weights_off() -> None:
    lm = stree.TreeLM(tiny_model("mamba2", torch.float32))
    lm.compile()
    assert any("forward" in module.__dict__ for module in lm.model.modules() if type(module) is nn.Linear)
    model = lm.release()
    assert not any("forward" in module.__dict__ for module in model.modules())
