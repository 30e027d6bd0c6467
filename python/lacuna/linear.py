"""Linear layers whose weights are FP8, 2:4 sparse, or both."""

from typing import Any, Callable, ClassVar, Optional, Union

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import Self

from lacuna import _core
from lacuna._core import Error
from lacuna.ops import FLOATS, _share, check_device, check_input

Mask = Union[None, str, Tensor]


class PackedLinear(nn.Module):
    """y = x W^T + bias, of weights in one of the program's layouts (docs/image.md, "Layouts"). For inference: there are no gradients.

    x: [..., in_features] float32, float16 or bfloat16; y: [..., out_features] in x's type. ``state_dict`` has ``packed``, the canonical bytes
    (uint8 [out_features, row_bytes]), and ``bias`` (float32). On a CUDA device only the form that tensor cores read is held, which is made when the
    module is moved there; ``state_dict`` turns it back. Conversions of type (``half()``, ``to(torch.bfloat16)``) change neither.

    ``accumulate`` says how tensor cores keep sums of FP8 products: "fast" in their registers, "full" in float32.
    """

    layout: ClassVar[str]
    sparse: ClassVar[bool]
    scaled: ClassVar[bool]  # weights and tokens are E4M3 codes with scales

    packed: Optional[Tensor]
    bias: Optional[Tensor]
    blocks: Optional[Tensor]
    block_scale: Optional[Tensor]
    _like: Tensor
    accumulate: str

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Union[None, str, torch.device] = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """A layer of zeros, for ``load_state_dict``. dtype: what ``weight.dtype`` says."""
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.accumulate = "fast"
        device = torch.device(device) if device is not None else torch.get_default_device()
        start = torch.device("meta") if device.type == "meta" else torch.device("cpu")
        rows = torch.zeros(out_features, _core.row_bytes(self.layout, in_features), dtype=torch.uint8, device=start)
        self.register_buffer("packed", rows)
        self.register_buffer("bias", torch.zeros(out_features, device=start) if bias else None)
        self.register_buffer("blocks", None)
        self.register_buffer("block_scale", None)  # float32 as bytes, so that conversions of type leave it alone
        self.register_buffer("_like", torch.empty(0, dtype=dtype, device=start))  # its type follows conversions
        if device.type not in ("cpu", "meta"):
            self.to(device)

    @classmethod
    def from_weight(
        cls,
        weight: Tensor,
        bias: Optional[Tensor] = None,
        mask: Mask = None,
        norms: Optional[Tensor] = None,
        *,
        name: str = "weight",
    ) -> Self:
        """The layer of a matrix, on the matrix's device.

        weight: [N, K] float32, float16 or bfloat16, finite; bias: [N]. Which weights a 2:4 layer keeps: mask "magnitude", the two largest of every
        four inputs; "wanda", the two of the largest |w| times norm of the input; "nonzero", those of a matrix that is 2:4 already; or a tensor
        [N, K] with two of every four true (not 0). None: "wanda" where norms are given, else "magnitude". norms: [K], the L2 norm of each input over
        calibration tokens. Fp8Linear keeps all and takes neither. name: begins errors. Raises Error, naming the row, for what is not as said.
        """
        check_weight(weight, bias, name)
        check_device(weight.device, cls.layout, name)
        try:
            out = cls(weight.shape[1], weight.shape[0], bias is not None, "cpu", weight.dtype)
            values = weight.detach().to("cpu", torch.float32).contiguous()
            keep = cls._keep(values, mask, norms)
            assert out.packed is not None
            _core.encode(cls.layout, _share(values), _share(keep), _share(out.packed))
            if bias is not None:
                out.bias = bias.detach().to("cpu", torch.float32, copy=True).contiguous()
        except Error as error:
            raise Error(f"{name}: {error}") from None
        return out.to(weight.device)

    @classmethod
    def _keep(cls, weight: Tensor, mask: Mask, norms: Optional[Tensor]) -> Optional[Tensor]:
        """uint8 [N, K]; None of a dense layout."""
        if not cls.sparse:
            if mask is not None or norms is not None:
                raise Error(f"{cls.layout} keeps every weight; leave out mask and norms")
            return None
        if isinstance(mask, Tensor):
            if norms is not None:
                raise Error("a mask and norms are given; leave out one")
            if mask.shape != weight.shape:
                raise Error(f"the mask is {list(mask.shape)}, but the weight {list(weight.shape)}")
            return (mask.detach() != 0).to("cpu", torch.uint8).contiguous()
        method = mask if mask is not None else "magnitude" if norms is None else "wanda"
        if method not in ("magnitude", "wanda", "nonzero"):
            raise Error(f'unknown mask "{method}"; it is a tensor, "magnitude", "wanda" or "nonzero"')
        if (method == "wanda") != (norms is not None):
            raise Error("the mask wanda needs norms" if norms is None else f"the mask {method} takes no norms; leave them out")
        keep = torch.empty(weight.shape, dtype=torch.uint8)
        if method == "nonzero":
            _core.keep_nonzero(_share(weight), _share(keep))
        else:
            of_inputs = None if norms is None else norms.detach().to("cpu", torch.float32).contiguous()
            _core.keep_largest(_share(weight), _share(of_inputs), _share(keep))
        return keep

    # ---- what it holds ----

    @property
    def weight(self) -> Tensor:
        """Shape and type of the matrix on the meta device, for code that asks for them. It has no values: ``dequantize`` has."""
        return torch.empty(self.out_features, self.in_features, dtype=self._like.dtype, device="meta")

    @property
    def device(self) -> torch.device:
        return self._stored().device

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights as they are held now, without the bias."""
        held = (self.packed, self.blocks, self.block_scale)
        return sum(one.numel() * one.element_size() for one in held if one is not None)

    def dequantize(self) -> Tensor:
        """The matrix that the layer multiplies with: float32 [out_features, in_features] on the CPU; dropped weights are 0."""
        packed = self._canonical()
        out = torch.empty(self.out_features, self.in_features)
        _core.decode(self.layout, _share(packed), _share(out))
        return out

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, layout={self.layout}"

    def _stored(self) -> Tensor:
        stored = self.packed if self.packed is not None else self.blocks
        assert stored is not None
        return stored

    def _canonical(self) -> Tensor:
        """The canonical bytes: the buffer itself where it is there, else made on the CPU."""
        if self.packed is not None:
            return self.packed.cpu()
        assert self.blocks is not None and self.block_scale is not None
        packed = torch.empty(self.out_features, _core.row_bytes(self.layout, self.in_features), dtype=torch.uint8)
        scale = self.block_scale.cpu().view(torch.float32)
        _core.canonical(self.layout, self.in_features, _share(self.blocks.cpu()), _share(scale), _share(packed))
        return packed

    @torch.compiler.disable
    def _make_tiles(self, device: torch.device) -> None:
        """From canonical bytes to the form of tensor cores, on a device."""
        assert self.packed is not None
        blocks, scale = _core.make_tiles(self.layout, self.in_features, _share(self.packed.cpu()))
        self.blocks, self.block_scale = blocks.to(device), scale.view(torch.uint8).to(device)
        self.packed = None

    @torch.compiler.disable
    def _make_packed(self) -> None:
        """And back, on the CPU."""
        self.packed = self._canonical()
        self.blocks = self.block_scale = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        stored = self._stored()
        device = fn(torch.empty(0, dtype=torch.uint8, device=stored.device)).device
        check_device(device, self.layout, type(self).__name__)
        if device.type == "cuda" and self.packed is not None and stored.device.type != "meta":
            self._make_tiles(torch.device("cpu"))
        bias = self.bias
        if bias is not None:
            self.bias = bias.view(torch.uint8)
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        finally:
            if self.bias is not None:
                self.bias = self.bias.view(torch.float32)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        meta = self._stored().device.type == "meta"
        destination[prefix + "packed"] = self.packed if meta or self.packed is not None else self._canonical()
        if self.bias is not None:
            destination[prefix + "bias"] = self.bias

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        expected = {"packed": self._load_packed, **({"bias": self._load_bias} if self.bias is not None else {})}
        for key, load in expected.items():
            value = state_dict.get(prefix + key)
            if value is None:
                if strict:
                    missing_keys.append(prefix + key)
                continue
            try:
                load(value, bool(local_metadata.get("assign_to_params_buffers", False)))
            except Error as error:
                error_msgs.append(f"{prefix}{key}: {error}")
        if strict:
            unexpected_keys += [key for key in state_dict if key.startswith(prefix) and key[len(prefix) :] not in expected]

    def check_packed(self, value: Tensor) -> None:
        """Raises Error unless these are canonical bytes of such a layer."""
        shape = [self.out_features, _core.row_bytes(self.layout, self.in_features)]
        if value.dtype != torch.uint8 or list(value.shape) != shape:
            raise Error(f"it is {value.dtype} {list(value.shape)}, but {self.layout} of this layer is torch.uint8 {shape}")
        if value.device.type != "meta":
            _core.check(self.layout, self.in_features, _share(value.cpu().contiguous()))

    def _load_packed(self, value: Tensor, assign: bool) -> None:
        self.check_packed(value)
        device = value.device if assign or self.device.type == "meta" else self.device
        self.packed, self.blocks, self.block_scale = value.detach().contiguous(), None, None
        if device.type == "cuda":
            self._make_tiles(device)
        elif not assign:
            self.packed = value.detach().to(device, copy=True).contiguous()
        if self._like.device != self.device:
            self._like = torch.empty(0, dtype=self._like.dtype, device=self.device)

    def _load_bias(self, value: Tensor, assign: bool) -> None:
        if list(value.shape) != [self.out_features]:
            raise Error(f"it is {list(value.shape)}, but has to be [{self.out_features}]")
        assert self.bias is not None
        device = value.device if assign or self.bias.device.type == "meta" else self.bias.device
        self.bias = value.detach().to(device, torch.float32, copy=not assign).contiguous()

    # ---- what it computes ----

    def forward(self, x: Tensor) -> Tensor:
        who = type(self).__name__
        check_input(x, who)
        if x.shape[-1] != self.in_features:
            raise Error(f"{who}: the input has {x.shape[-1]} features, but the layer {self.in_features}")
        if x.device != self._stored().device:
            raise Error(f"{who}: the input is on {x.device}, but the layer on {self._stored().device}; move one of them")
        if x.requires_grad and torch.is_grad_enabled():
            raise Error(f"{who}: there are no gradients of packed weights; run it under torch.no_grad()")
        if self.accumulate not in ("fast", "full"):
            raise Error(f'{who}: accumulate is "{self.accumulate}", but has to be "fast" or "full"')
        rows = x.reshape(-1, self.in_features)
        y = self._on_cuda(rows) if x.device.type == "cuda" else self._on_cpu(rows)
        return y.reshape(*x.shape[:-1], self.out_features)

    def _on_cpu(self, x: Tensor) -> Tensor:
        if self.packed is None:
            self._make_packed()
        values = x if self.scaled else x.to(torch.bfloat16)  # as tensor cores read it
        return torch.ops.lacuna.packed_linear(values, self.packed, self.bias, self.layout, x.dtype)

    def _on_cuda(self, x: Tensor) -> Tensor:
        if self.blocks is None:
            self._make_tiles(x.device)
        assert self.block_scale is not None
        x_scale: Optional[Tensor] = None
        scale: Optional[Tensor] = None
        if self.scaled:
            codes, x_scale = torch.ops.lacuna.quantize_per_token(x)
            scale = self.block_scale
        else:
            codes = x.to(torch.bfloat16)
            if self.in_features % 8 != 0:  # rows of a multiple of 16 bytes
                codes = functional.pad(codes, (0, -self.in_features % 8))
        return torch.ops.lacuna.tensor_core_linear(
            codes, x_scale, self.blocks, scale, self.bias, self.layout, self.out_features, self.in_features, x.dtype, self.accumulate
        )


class Fp8Linear(PackedLinear):
    """Weights in f8: E4M3 codes, one scale an output. Inputs are quantized token by token."""

    layout, sparse, scaled = "f8", False, True


class Sparse24Fp8Linear(PackedLinear):
    """Weights in nm24_f8: of every four inputs two, as E4M3 codes with the scale that the dense row has. Inputs are quantized token by token."""

    layout, sparse, scaled = "nm24_f8", True, True


class Sparse24Bf16Linear(PackedLinear):
    """Weights in nm24_bf16: of every four inputs two, in bfloat16. Inputs are rounded to bfloat16, sums are float32."""

    layout, sparse, scaled = "nm24_bf16", True, False


LAYERS: dict[str, type[PackedLinear]] = {layer.layout: layer for layer in (Fp8Linear, Sparse24Fp8Linear, Sparse24Bf16Linear)}


def check_weight(weight: Tensor, bias: Optional[Tensor], name: str) -> None:
    """Raises Error for a matrix and a bias that no layer can hold."""
    if weight.dim() != 2 or 0 in weight.shape:
        raise Error(f"{name}: it is {list(weight.shape)}, but a weight is [N, K], neither of them 0")
    if weight.dtype not in FLOATS:
        raise Error(f"{name}: it is {weight.dtype}, but has to be float32, float16 or bfloat16")
    if weight.device.type == "meta":
        raise Error(f"{name}: it is on the meta device and has no values; load them first")
    if bias is not None and list(bias.shape) != [weight.shape[0]]:
        raise Error(f"{name}: its bias is {list(bias.shape)}, but has to be [{weight.shape[0]}]")
    if bias is not None and not bool(torch.isfinite(bias).all()):
        raise Error(f"{name}: its bias is not finite")
