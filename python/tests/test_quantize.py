import pytest
import torch
from reference import quantized

import lacuna


def bits(codes: torch.Tensor) -> torch.Tensor:
    return codes.cpu().view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0, 16), (1, 1), (3, 77), (2, 5, 64), (15, 288), (17, 3072), (128,)])
def test_gives_the_bytes_of_the_contract(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = (torch.randn(shape) * 3).to(dtype)
    codes, scale = lacuna.quantize_per_token(x.to(device))
    expected_codes, expected_scale = quantized(x)
    assert codes.dtype == torch.float8_e4m3fn and codes.shape == x.shape and codes.device == scale.device
    assert scale.dtype == torch.float32 and scale.shape == x.shape[:-1]
    assert torch.equal(scale.cpu(), expected_scale)
    assert torch.equal(bits(codes), bits(expected_codes))


def test_values_at_the_edges(device: torch.device) -> None:
    rows = [[0.0, -0.0, 0.0, 0.0], [448, 464, 1e4, -448], [1e-40, -1e-40, 1e-39, 0], [2**-10, 448, -(2**-9), 1], [65504, -65504, 1, 2**-24]]
    x = torch.tensor(rows)
    codes, scale = lacuna.quantize_per_token(x.to(device))
    expected_codes, expected_scale = quantized(x)
    assert torch.equal(scale.cpu(), expected_scale)
    assert torch.equal(bits(codes), bits(expected_codes))
    assert bool(torch.isfinite(codes.float()).all())


def test_nan_and_infinity_stay_in_their_token(device: torch.device) -> None:
    x = torch.randn(3, 32)
    x[0, 3], x[2, 5] = float("nan"), float("inf")
    codes, scale = lacuna.quantize_per_token(x.to(device))
    codes, scale = codes.cpu().float(), scale.cpu()
    assert torch.isnan(codes[0, 3]) and torch.isnan(codes[0]).sum() == 1
    assert torch.isinf(scale[2]) and torch.isnan(codes[2, 5])
    alone, alone_scale = lacuna.quantize_per_token(x[1:2].to(device))
    assert torch.equal(bits(alone)[0], codes[1].to(torch.float8_e4m3fn).view(torch.uint8)) and alone_scale.item() == scale[1].item()


def test_takes_views(device: torch.device) -> None:
    x = torch.randn(9, 65)[:, 1:].T.to(device)  # neither contiguous nor aligned
    codes, scale = lacuna.quantize_per_token(x)
    expected_codes, expected_scale = quantized(x.cpu())
    assert torch.equal(bits(codes), bits(expected_codes)) and torch.equal(scale.cpu(), expected_scale)


@pytest.mark.parametrize(
    "x, words", [(torch.ones(2, 4, dtype=torch.int32), "torch.int32"), (torch.tensor(1.0), "no dimension"), (torch.ones(2, 0), "tokens of no values")]
)
def test_refuses_other_tensors(x: torch.Tensor, words: str) -> None:
    with pytest.raises(lacuna.Error, match=words):
        lacuna.quantize_per_token(x)
