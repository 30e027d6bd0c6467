"""Operators of torch: ``torch.ops.lacuna.*``, which eager code and ``torch.compile`` call alike.

They are defined by ``torch.library.Library`` and not by ``torch.library.custom_op``, whose wrapper costs three times as much a call.
"""

from typing import Any, Optional

import torch
from torch import Tensor
from torch.utils.dlpack import to_dlpack

from lacuna import _core
from lacuna._core import Error

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_ROW = 16  # bytes: rows of codes begin at multiples of it

_library = torch.library.Library("lacuna", "DEF")


def _share(tensor: Optional[Tensor]) -> Any:
    """As the extension takes it."""
    return None if tensor is None else to_dlpack(tensor)


def _stream(tensor: Tensor) -> int:
    return torch.cuda.current_stream(tensor.device).cuda_stream


def _aligned(x: Tensor) -> Tensor:
    x = x.contiguous()
    return x if x.data_ptr() % _ROW == 0 else x.clone()


def padded(K: int) -> int:
    """Bytes from one row of codes to the next."""
    return (K + _ROW - 1) // _ROW * _ROW


# ---- quantization of tokens ----

# Codes are bytes inside operators: torch compares, clears and exchanges those everywhere, float8 not.
_library.define("quantize_per_token(Tensor x) -> (Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,))


def _empty_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    M, K = x.shape
    make = x.new_empty if padded(K) == K else x.new_zeros
    return make((M, padded(K)), dtype=torch.uint8), x.new_empty((M,), dtype=torch.float32)


@torch.library.register_fake("lacuna::quantize_per_token", lib=_library)
def _quantize_fake(x: Tensor) -> tuple[Tensor, Tensor]:
    return _empty_codes(x)


@torch.library.impl(_library, "quantize_per_token", "CPU")
def _quantize_cpu(x: Tensor) -> tuple[Tensor, Tensor]:
    codes, scale = _empty_codes(x)
    _core.quantize_per_token(_share(x.float().contiguous()), _share(codes), _share(scale))
    return codes, scale


@torch.library.impl(_library, "quantize_per_token", "CUDA")
def _quantize_cuda(x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.cuda.device(x.device):
        codes, scale = _empty_codes(x)
        _core.cuda_quantize_per_token(_share(x.contiguous()), _share(codes), _share(scale), _stream(x))
    return codes, scale


def quantize_per_token(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each token's E4M3 codes and its scale: scale = max |x| / 448, at least 2^-126; x is about scale * codes.

    x: [..., K] float32, float16 or bfloat16 on the CPU or a CUDA device. Returns codes float8_e4m3fn [..., K] and scale float32 [...]. Codes round to
    nearest even and saturate; a token with a NaN or an infinity has NaN codes or an infinite scale. Every device returns the same bytes, but for the
    sign of a NaN. Raises Error for another type, and on a CUDA device where the package is built without CUDA.
    """
    check_input(x, "quantize_per_token")
    K = x.shape[-1]
    if K == 0:
        raise Error("quantize_per_token: the input has tokens of no values; it has to be [..., K], K at least 1")
    codes, scale = torch.ops.lacuna.quantize_per_token(x.reshape(-1, K))
    return codes[:, :K].reshape(x.shape).view(torch.float8_e4m3fn), scale.reshape(x.shape[:-1])


def compile_options() -> dict[str, Any]:
    """Options of ``torch.compile(module, options=...)`` with which layers that share an input quantize it once on CUDA devices."""
    from lacuna.inductor import SharedQuantization  # takes a second to import

    return {"post_grad_custom_pre_pass": SharedQuantization()}


# ---- products ----

_library.define("packed_linear(Tensor x, Tensor packed, Tensor? bias, str layout, ScalarType dtype) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


@torch.library.register_fake("lacuna::packed_linear", lib=_library)
def _packed_linear_fake(x: Tensor, packed: Tensor, bias: Optional[Tensor], layout: str, dtype: torch.dtype) -> Tensor:
    return x.new_empty((x.shape[0], packed.shape[0]), dtype=dtype)


@torch.library.impl(_library, "packed_linear", "CPU")
def _packed_linear_cpu(x: Tensor, packed: Tensor, bias: Optional[Tensor], layout: str, dtype: torch.dtype) -> Tensor:
    y = x.new_empty((x.shape[0], packed.shape[0]), dtype=torch.float32)
    _core.linear(layout, _share(x.float().contiguous()), _share(packed), _share(bias), _share(y))
    return y.to(dtype)


# scale: float32 as bytes, as layers keep it.
_library.define(
    "tensor_core_linear(Tensor x, Tensor? x_scale, Tensor blocks, Tensor? scale, Tensor? bias, str layout, int N, int K, ScalarType dtype, "
    "str accumulate) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@torch.library.register_fake("lacuna::tensor_core_linear", lib=_library)
def _tensor_core_linear_fake(
    x: Tensor,
    x_scale: Optional[Tensor],
    blocks: Tensor,
    scale: Optional[Tensor],
    bias: Optional[Tensor],
    layout: str,
    N: int,
    K: int,
    dtype: torch.dtype,
    accumulate: str,
) -> Tensor:
    return x.new_empty((x.shape[0], N), dtype=dtype)


@torch.library.impl(_library, "tensor_core_linear", "CUDA")
def _tensor_core_linear_cuda(
    x: Tensor,
    x_scale: Optional[Tensor],
    blocks: Tensor,
    scale: Optional[Tensor],
    bias: Optional[Tensor],
    layout: str,
    N: int,
    K: int,
    dtype: torch.dtype,
    accumulate: str,
) -> Tensor:
    with torch.cuda.device(x.device):
        y = x.new_empty((x.shape[0], N), dtype=dtype)
        scales = None if scale is None else scale.view(torch.float32)
        _core.cuda_linear(layout, K, _share(_aligned(x)), _share(x_scale), _share(blocks), _share(scales), _share(bias), _share(y), accumulate, _stream(x))
    return y


def check_input(x: Tensor, who: str) -> None:
    """Raises Error for a type that has no kernel, and for a tensor without dimensions."""
    if x.dtype not in FLOATS:
        raise Error(f"{who}: the input is {x.dtype}, but has to be float32, float16 or bfloat16")
    if x.dim() == 0:
        raise Error(f"{who}: the input has no dimension; it has to be [..., K]")


def check_device(device: torch.device, layout: str, who: str) -> None:
    """Raises Error for a device on which a layer of this layout cannot run, saying why."""
    if device.type in ("cpu", "meta"):
        return
    if device.type != "cuda":
        raise Error(f"{who}: device {device} has no kernels; it has to be the CPU or a CUDA device")
    if not _core.has_cuda:
        raise Error(f"{who}: this package is built without CUDA; install it where nvcc 12.4 or later is on the PATH, or stay on the CPU")
    if not torch.cuda.is_available():
        raise Error(f"{who}: torch finds no CUDA device; stay on the CPU, or use a torch made for CUDA and a driver for it")
    need = (8, 0) if layout == "nm24_bf16" else (8, 9)
    have = torch.cuda.get_device_capability(device)
    if have < need:
        raise Error(f"{who}: {torch.cuda.get_device_name(device)} has compute capability {have[0]}.{have[1]}, but {layout} needs {need[0]}.{need[1]} or later")
    with torch.cuda.device(device):
        try:
            _core.cuda_open(torch.cuda.current_device())
        except Error as error:
            raise Error(f"{who}: {str(error).removeprefix('--device cuda: ')}") from None
