import contextlib
import copy
import io
from typing import Any, Callable

import pytest
import torch
from reference import LAYERS, decode, product, quantized
from torch import nn

import lacuna
from lacuna import Fp8Linear, PackedLinear, Sparse24Bf16Linear, Sparse24Fp8Linear
from lacuna.ops import check_device

SHAPES = [(1, 1), (3, 2), (64, 128), (100, 77), (4100, 64), (17, 4304)]  # N, K


def assert_close(layer: PackedLinear, x: torch.Tensor, y: torch.Tensor) -> None:
    expected, bound = product(layer, x, tensor_core=x.device.type == "cuda")
    y = y.detach().cpu().double()
    wrong = ~((y - expected).abs() <= bound)
    assert not bool(wrong.any()), f"{int(wrong.sum())} values are off, the first by {float((y - expected).abs()[wrong][0])}"


@pytest.mark.parametrize("layer_type", LAYERS)
@pytest.mark.parametrize("N, K", SHAPES)
def test_product_equals_the_reference(device: torch.device, layer_type: type[PackedLinear], N: int, K: int) -> None:
    layer = layer_type.from_weight(torch.randn(N, K), torch.randn(N)).to(device)
    for M in (1, 16, 17):
        x = torch.randn(M, K, device=device)
        assert_close(layer, x, layer(x))


@pytest.mark.parametrize("layer_type", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_types_and_leading_dimensions(device: torch.device, layer_type: type[PackedLinear], dtype: torch.dtype) -> None:
    layer = layer_type.from_weight(torch.randn(40, 48, dtype=dtype)).to(device)
    for shape in [(48,), (5, 48), (2, 3, 48), (0, 48), (2, 0, 48)]:
        x = torch.randn(shape).to(dtype).to(device)
        y = layer(x)
        assert y.dtype == dtype and y.shape == (*shape[:-1], 40) and y.device == x.device
        assert_close(layer, x, y)


@pytest.mark.parametrize("layer_type", LAYERS)
def test_a_device_that_is_not_the_current_one(device: torch.device, layer_type: type[PackedLinear]) -> None:
    if device.type == "cpu":
        return
    if torch.cuda.device_count() < 2:
        pytest.skip("on CUDA: there is one device only")
    layer = layer_type.from_weight(torch.randn(70, 64), torch.randn(70)).to("cuda:1")
    x = torch.randn(5, 64, device="cuda:1")
    y = layer(x)
    assert y.device == x.device and torch.cuda.current_device() == 0
    assert_close(layer, x, y)
    with pytest.raises(lacuna.Error, match="the input is on cuda:0, but the layer on cuda:1; move one of them"):
        layer(x.to("cuda:0"))
    assert_close(layer.to("cuda:0"), x, layer(x.to("cuda:0")))


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows apart": lambda values: torch.cat([values, values], -1)[:, : values.shape[1]],
    "not aligned": lambda values: torch.cat([values[:, :1], values], -1)[:, 1:],
    "contiguous, not aligned": lambda values: torch.cat([values.flatten()[:1], values.flatten()])[1:].view(values.shape),
    "transposed": lambda values: values.T.contiguous().T,
    "every second row": lambda values: values.repeat_interleave(2, 0)[::2],
    "one row for all": lambda values: values[:1].expand(*values.shape),
}


@pytest.mark.parametrize("layer_type", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("view", VIEWS)
def test_views_of_inputs(device: torch.device, layer_type: type[PackedLinear], dtype: torch.dtype, view: str) -> None:
    layer = layer_type.from_weight(torch.randn(32, 64)).to(device)
    x = VIEWS[view](torch.randn(6, 64, device=device, dtype=dtype))
    assert torch.equal(layer(x), layer(x.clone(memory_format=torch.contiguous_format)))
    assert_close(layer, x, layer(x))


@pytest.mark.parametrize("layer_type", LAYERS)
@torch.inference_mode()
def test_inference_mode(device: torch.device, layer_type: type[PackedLinear]) -> None:
    layer = layer_type.from_weight(torch.randn(32, 64)).to(device)
    x = torch.randn(6, 64, device=device)
    assert_close(layer, x, layer(x))


@pytest.mark.parametrize("layer_type", [Fp8Linear, Sparse24Fp8Linear])
def test_full_accumulation(device: torch.device, layer_type: type[PackedLinear]) -> None:
    layer = layer_type.from_weight(torch.randn(32, 4096).abs()).to(device)
    x = torch.randn(16, 4096, device=device).abs()  # sums of one sign: what is lost adds up
    exact, _ = product(layer, x)
    errors = {}
    for mode in ("fast", "full"):
        layer.accumulate = mode
        y = layer(x)
        assert_close(layer, x, y)
        errors[mode] = float((y.cpu().double() - exact).norm() / exact.norm())
    if device.type == "cuda":
        assert errors["full"] < 0.5 * errors["fast"]
    layer.accumulate = "slow"
    with pytest.raises(lacuna.Error, match='accumulate is "slow", but has to be "fast" or "full"'):
        layer(x)


def test_a_nan_token_does_not_touch_others(device: torch.device) -> None:
    for layer_type in LAYERS:
        layer = layer_type.from_weight(torch.randn(64, 64)).to(device)
        x = torch.randn(4, 64, device=device)
        clean = layer(x)
        x[2] = float("nan")
        y = layer(x)
        assert bool(torch.isnan(y[2]).all())
        assert torch.equal(y[[0, 1, 3]], clean[[0, 1, 3]])


@pytest.mark.parametrize("layer_type", LAYERS)
def test_packed_bytes_are_those_of_the_format(layer_type: type[PackedLinear]) -> None:
    weight = torch.randn(9, 22)
    layer = layer_type.from_weight(weight)
    stored = decode(layer.layout, layer.packed, 22)
    assert torch.equal(layer.dequantize(), stored.float())
    codes, scale = quantized(weight)
    if layer.scaled:  # weights are divided by their scale, tokens multiplied with its inverse: codes may differ at ties
        grid = (weight / scale[:, None]).to(torch.float8_e4m3fn).float() * scale[:, None]
    else:
        grid = weight.to(torch.bfloat16).float()
    kept = stored != 0
    assert torch.equal(stored.float()[kept], grid[kept])
    assert bool(kept.all()) != layer.sparse


def test_magnitude_and_wanda_keep_the_two_largest_of_four() -> None:
    weight = torch.tensor([[1.0, -4.0, 3.0, 2.0, 5.0, 5.0, 5.0, 0.0, 7.0, -0.5]])
    layer = Sparse24Bf16Linear.from_weight(weight)
    assert layer.dequantize().tolist() == [[0, -4, 3, 0, 5, 5, 0, 0, 7, -0.5]]
    norms = torch.tensor([9.0, 0.1, 1.0, 2.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0])
    layer = Sparse24Bf16Linear.from_weight(weight, norms=norms)
    assert layer.dequantize().tolist() == [[1, 0, 0, 2, 5, 0, 5, 0, 7, -0.5]]  # of equal ones the first
    assert torch.equal(Sparse24Bf16Linear.from_weight(weight, mask="wanda", norms=norms).packed, layer.packed)


def test_masks_as_tensors_and_of_pruned_weights() -> None:
    weight = torch.randn(6, 16)
    mask = torch.zeros(6, 16, dtype=torch.bool)
    mask[:, 1::4] = mask[:, 2::4] = True
    layer = Sparse24Fp8Linear.from_weight(weight, mask=mask)
    assert torch.equal(layer.dequantize() != 0, mask)
    pruned = Sparse24Fp8Linear.from_weight(weight * mask, mask="nonzero")
    assert torch.equal(pruned.dequantize() != 0, mask)
    with pytest.raises(lacuna.Error, match=r"layer\.weight: row 0: the group of four at input 0 has 4"):
        Sparse24Fp8Linear.from_weight(weight, mask="nonzero", name="layer.weight")
    mask[3, 8] = True
    with pytest.raises(lacuna.Error, match="row 3: the group of four at input 8 keeps 3"):
        Sparse24Fp8Linear.from_weight(weight, mask=mask)


REFUSED: list[tuple[type[PackedLinear], dict[str, Any], str]] = [
    (Fp8Linear, {"weight": torch.ones(2, 2, 2)}, r"it is \[2, 2, 2\], but a weight is \[N, K\]"),
    (Fp8Linear, {"weight": torch.ones(0, 4)}, "neither of them 0"),
    (Fp8Linear, {"weight": torch.ones(2, 4, dtype=torch.float64)}, "it is torch.float64"),
    (Fp8Linear, {"weight": torch.ones(2, 4, device="meta")}, "meta device"),
    (Fp8Linear, {"weight": torch.ones(2, 4), "bias": torch.ones(3)}, r"bias is \[3\], but has to be \[2\]"),
    (Fp8Linear, {"weight": torch.ones(2, 4), "bias": torch.tensor([0.0, float("inf")])}, "bias is not finite"),
    (Fp8Linear, {"weight": torch.tensor([[1.0, 2.0], [float("nan"), 1.0]])}, "row 1, input 0 is nan"),
    (Fp8Linear, {"weight": torch.ones(2, 4), "mask": "magnitude"}, "keeps every weight"),
    (Sparse24Fp8Linear, {"weight": torch.tensor([[1.0, float("inf")]])}, "row 0, input 1 is inf"),
    (Sparse24Fp8Linear, {"weight": torch.ones(2, 4), "mask": "random"}, 'unknown mask "random"'),
    (Sparse24Fp8Linear, {"weight": torch.ones(2, 4), "mask": "wanda"}, "needs norms"),
    (Sparse24Fp8Linear, {"weight": torch.ones(2, 4), "mask": "magnitude", "norms": torch.ones(4)}, "takes no norms"),
    (Sparse24Fp8Linear, {"weight": torch.ones(2, 4), "norms": torch.ones(5)}, "norms: 5 values for 4 inputs"),
    (Sparse24Fp8Linear, {"weight": torch.ones(2, 4), "norms": torch.tensor([1.0, 1.0, -1.0, 1.0])}, "input 2 has -1"),
    (Sparse24Fp8Linear, {"weight": torch.ones(2, 4), "mask": torch.ones(2, 3)}, r"mask is \[2, 3\], but the weight \[2, 4\]"),
]


@pytest.mark.parametrize("layer_type, arguments, words", REFUSED, ids=[words for _, _, words in REFUSED])
def test_refuses_weights_and_masks(layer_type: type[PackedLinear], arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(lacuna.Error, match=words):
        layer_type.from_weight(**arguments)


def test_refuses_inputs() -> None:
    layer = Fp8Linear.from_weight(torch.ones(2, 4))
    with pytest.raises(lacuna.Error, match="the input has 5 features, but the layer 4"):
        layer(torch.ones(3, 5))
    with pytest.raises(lacuna.Error, match="torch.float64"):
        layer(torch.ones(3, 4, dtype=torch.float64))
    with pytest.raises(lacuna.Error, match="the input is on meta, but the layer on cpu"):
        layer(torch.ones(3, 4, device="meta"))
    x = torch.ones(3, 4, requires_grad=True)
    with pytest.raises(lacuna.Error, match="no gradients"):
        layer(x)
    with torch.no_grad():
        layer(x)


@pytest.mark.parametrize("layer_type", LAYERS)
def test_state_goes_to_a_file_and_back(device: torch.device, layer_type: type[PackedLinear]) -> None:
    layer = layer_type.from_weight(torch.randn(70, 50), torch.randn(70)).to(device)
    x = torch.randn(3, 50, device=device)
    y = layer(x)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    state = torch.load(file)
    assert set(state) == {"packed", "bias"} and state["packed"].dtype == torch.uint8
    other = layer_type(50, 70, device=device)
    other.load_state_dict(state)
    assert torch.equal(other(x), y)
    empty = layer_type(50, 70, device="meta")
    empty.load_state_dict(state, assign=True)
    assert torch.equal(empty.to(device)(x), y)
    assert torch.equal(copy.deepcopy(layer)(x), y)


def test_load_refuses_what_is_not_such_a_layer() -> None:
    layer = Sparse24Fp8Linear.from_weight(torch.randn(8, 16), torch.zeros(8))
    before = layer.packed.clone()
    state = layer.state_dict()
    with pytest.raises(RuntimeError, match="Missing key.*packed"):
        layer.load_state_dict(nn.Linear(16, 8).state_dict())
    with pytest.raises(RuntimeError, match="Unexpected key.*weight"):
        layer.load_state_dict({**state, "weight": torch.zeros(8, 16)})
    with pytest.raises(RuntimeError, match=r"packed: it is torch.uint8 \[8, 5\]"):
        layer.load_state_dict({**state, "packed": state["packed"][:, :5]})
    with pytest.raises(RuntimeError, match=r"bias: it is \[3\]"):
        layer.load_state_dict({**state, "bias": torch.zeros(3)})
    damaged = state["packed"].clone()
    damaged[5, 4] = 0  # places 0 and 0
    with pytest.raises(RuntimeError, match="row 5 is not nm24_f8"):
        layer.load_state_dict({**state, "packed": damaged})
    assert torch.equal(layer.packed, before)


@pytest.mark.parametrize("layer_type", LAYERS)
@pytest.mark.parametrize("N, K", SHAPES)
def test_form_of_tensor_cores_turns_back(layer_type: type[PackedLinear], N: int, K: int) -> None:
    layer = layer_type.from_weight(torch.randn(N, K))
    packed, weight, x = layer.packed.clone(), layer.dequantize(), torch.randn(2, K)
    y = layer(x)
    layer._make_tiles(torch.device("cpu"))
    assert layer.packed is None and layer.blocks is not None
    assert torch.equal(layer.state_dict()["packed"], packed) and torch.equal(layer.dequantize(), weight)
    assert torch.equal(layer(x), y) and torch.equal(layer.packed, packed)


def test_conversions_of_type_change_no_bit() -> None:
    layer = Fp8Linear.from_weight(torch.randn(8, 16), torch.randn(8))
    packed, bias = layer.packed.clone(), layer.bias.clone()
    for convert in (lambda one: one.to(torch.bfloat16), lambda one: one.half(), lambda one: one.float()):
        convert(layer)
        assert torch.equal(layer.packed, packed) and torch.equal(layer.bias, bias)
    layer._make_tiles(torch.device("cpu"))
    layer.half()
    assert torch.equal(layer.state_dict()["packed"], packed)
    assert layer.weight.dtype == torch.float16 and layer.weight.shape == (8, 16) and layer.weight.device.type == "meta"


def test_refuses_a_device_without_kernels() -> None:
    layer = Fp8Linear.from_weight(torch.randn(8, 16))
    with pytest.raises(lacuna.Error, match="device mps:0 has no kernels"):
        layer._apply(_Elsewhere("mps"))
    if not lacuna._core.has_cuda or not torch.cuda.is_available():
        with pytest.raises(lacuna.Error, match="finds no CUDA device" if lacuna._core.has_cuda else "built without CUDA"):
            layer._apply(_Elsewhere("cuda"))
    assert layer.packed is not None and layer.packed.device.type == "cpu"


@pytest.mark.parametrize(
    "capability, layer_type, refused", [((8, 0), Fp8Linear, True), ((8, 0), Sparse24Bf16Linear, False), ((7, 5), Sparse24Bf16Linear, True)]
)
def test_refuses_cards_by_what_a_layout_needs(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], layer_type: type[PackedLinear], refused: bool
) -> None:
    monkeypatch.setattr(lacuna._core, "has_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Card")
    opened: list[int] = []
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(lacuna._core, "cuda_open", opened.append)
    if not refused:
        check_device(torch.device("cuda"), layer_type.layout, "layer")
        assert opened == [3]
        return
    words = f"layer: Card has compute capability {capability[0]}.{capability[1]}, but {layer_type.layout} needs"
    with pytest.raises(lacuna.Error, match=words):
        check_device(torch.device("cuda"), layer_type.layout, "layer")


def test_refuses_cards_for_which_the_build_has_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_code(index: int) -> None:
        raise lacuna.Error(f"--device cuda: card {index} has compute capability 8.6, for which this build holds no code")

    monkeypatch.setattr(lacuna._core, "has_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(lacuna._core, "cuda_open", no_code)
    with pytest.raises(lacuna.Error, match="^layer: card 3 has compute capability 8.6, for which this build holds no code$"):
        check_device(torch.device("cuda"), "nm24_bf16", "layer")


class _Elsewhere:
    """A conversion to another device, as far as a layer looks at it."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device, 0)

    def __call__(self, tensor: torch.Tensor) -> Any:
        return self
