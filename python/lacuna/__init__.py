"""Linear layers of torch modules as FP8, 2:4 sparse, or both (QuaSpa: quantization and sparsification of diffusion transformers).

``replace_linears`` swaps the linear layers of a module by a policy; ``Sparse24Fp8Linear``, ``Fp8Linear`` and ``Sparse24Bf16Linear`` are the layers,
``quantize_per_token`` the quantization of their inputs, ``save_packed`` and ``load_packed`` their files. docs/python.md has examples.
"""

from importlib.metadata import PackageNotFoundError, version

from lacuna._core import Error, Policy, set_threads
from lacuna.linear import Fp8Linear, PackedLinear, Sparse24Bf16Linear, Sparse24Fp8Linear
from lacuna.ops import compile_options, quantize_per_token
from lacuna.packed_file import load_packed, save_packed
from lacuna.replace import Left, Replaced, Report, replace_linears

try:
    __version__ = version("lacuna")
except PackageNotFoundError:  # from a build folder, not installed
    __version__ = "unknown"

__all__ = [
    "Error",
    "Fp8Linear",
    "Left",
    "PackedLinear",
    "Policy",
    "Replaced",
    "Report",
    "Sparse24Bf16Linear",
    "Sparse24Fp8Linear",
    "compile_options",
    "load_packed",
    "quantize_per_token",
    "replace_linears",
    "save_packed",
    "set_threads",
]
