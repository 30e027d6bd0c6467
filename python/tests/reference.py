"""The layouts and their products written a second time, from the text of src/layout/tensor_core.h, in double precision."""

import torch
from torch import Tensor

from lacuna import Fp8Linear, PackedLinear, Sparse24Bf16Linear, Sparse24Fp8Linear

LAYERS = (Fp8Linear, Sparse24Fp8Linear, Sparse24Bf16Linear)
EPS = 2.0**-24  # half a unit in the last place of float32
STORED_EPS = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def e4m3(x: Tensor) -> Tensor:
    """float32 to codes, saturating."""
    nan = torch.isnan(x)
    codes = x.clamp(-448, 448).to(torch.float8_e4m3fn)
    return torch.where(nan, torch.full_like(x, float("nan")).to(torch.float8_e4m3fn).view(torch.uint8), codes.view(torch.uint8)).view(torch.float8_e4m3fn)


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scale of each row, in float32 as the contract says."""
    x = x.float()
    most = torch.where(torch.isnan(x), torch.zeros_like(x), x.abs()).amax(-1) if x.shape[-1] else x.new_zeros(x.shape[:-1])
    scale = torch.clamp(most / 448, min=2.0**-126)
    return e4m3(x * (1 / scale)[..., None]), scale


def decode(layout: str, packed: Tensor, K: int) -> Tensor:
    """Canonical bytes to double [N, K]."""
    packed = packed.cpu()
    N, groups = packed.shape[0], (K + 3) // 4
    at, scale = 0, torch.ones(N, 1, dtype=torch.float64)
    if layout != "nm24_bf16":
        scale, at = packed[:, :4].reshape(-1).view(torch.float32).double()[:, None], 4
    if layout == "f8":
        return scale * packed[:, at:].reshape(-1).view(torch.float8_e4m3fn).double().reshape(N, K)
    places = packed[:, at : at + (groups + 1) // 2]
    at += (groups + 1) // 2
    kind = torch.float8_e4m3fn if layout == "nm24_f8" else torch.bfloat16
    values = packed[:, at:].reshape(-1).clone().view(kind).double().reshape(N, 2 * groups)
    out = torch.zeros(N, 4 * groups, dtype=torch.float64)
    for kept in range(2 * groups):
        place = (places[:, kept // 4] >> (2 * (kept % 4))) & 3
        out[torch.arange(N), 4 * (kept // 2) + place.long()] = values[:, kept]
    return (scale * out)[:, :K]


def product(layer: PackedLinear, x: Tensor, tensor_core: bool = False) -> tuple[Tensor, Tensor]:
    """y in double precision, and a bound of what float32 sums and the rounding to x's type may be off.

    tensor_core: an instruction takes 16 or more inputs, aligns their FP8 products and the sum so far to the largest of them, A at most, and keeps 14 bits
    of each and of the new sum: K + 2 K / 16 losses of less than 2^-13 A.
    """
    weight = decode(layer.layout, layer.state_dict()["packed"], layer.in_features)
    x = x.detach().cpu()
    K = layer.in_features
    if layer.scaled:
        codes, scale = quantized(x)
        inputs = codes.double() * scale.double()[..., None]
    else:
        inputs = x.to(torch.bfloat16).double()
    bias = torch.zeros(layer.out_features, dtype=torch.float64) if layer.bias is None else layer.bias.cpu().double()
    y = inputs @ weight.T + bias
    size = inputs.abs() @ weight.abs().T + bias.abs()
    # A sum of K products in any order: at most K roundings of partial sums that are no larger than `size`; a product of codes and scales has three more.
    bound = (K + 4) * EPS * size + STORED_EPS[x.dtype] * (y.abs() + size * K * EPS) + 1e-37
    if tensor_core and layer.scaled:
        products = inputs[..., None, :] * weight
        largest = torch.maximum(products.abs(), products.cumsum(-1).abs()).amax(-1)
        bound += 1.01 * (K + 2 * (K // 16 + 1)) * 2.0**-13 * largest
    return y, bound
