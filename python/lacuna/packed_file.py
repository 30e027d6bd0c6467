"""Files of modules whose linear layers are packed: safetensors with the canonical bytes, and which layers they belong to."""

import json
import os
import tempfile
from typing import Any, Union

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from lacuna._core import Error
from lacuna.linear import LAYERS, PackedLinear

_KEY, _VERSION = "lacuna.layers", 1


def save_packed(module: nn.Module, path: Union[str, os.PathLike[str]]) -> None:
    """Writes a module's state: packed layers as canonical bytes, everything else as it is. The file appears when it is complete.

    Raises Error where no layer is packed, or a parameter has no values (the meta device).
    """
    layers = {
        name: {"layout": one.layout, "in_features": one.in_features, "out_features": one.out_features, "bias": one.bias is not None}
        for name, one in module.named_modules(remove_duplicate=False)
        if isinstance(one, PackedLinear)
    }
    if not layers:
        raise Error("the module has no packed layer; call replace_linears first")
    tensors: dict[str, Tensor] = {}
    places: set[int] = set()
    for name, tensor in module.state_dict().items():
        if tensor.device.type == "meta":
            raise Error(f"{name}: it is on the meta device and has no values; load them first")
        tensor = tensor.contiguous()
        place = tensor.untyped_storage().data_ptr()
        tensors[name] = tensor.clone() if place in places else tensor  # the format has no shared memory
        places.add(place)
    metadata = {"format": "pt", _KEY: json.dumps({"version": _VERSION, "layers": layers})}
    path = os.fspath(path)
    handle, unfinished = tempfile.mkstemp(prefix=os.path.basename(path) + ".", dir=os.path.dirname(path) or ".")
    os.close(handle)
    try:
        save_file(tensors, unfinished, metadata)
        with open(unfinished, "rb") as written:
            os.fsync(written.fileno())
        os.chmod(unfinished, 0o666 & ~_umask())
        os.replace(unfinished, path)
    except BaseException:
        os.unlink(unfinished)
        raise


def load_packed(module: nn.Module, path: Union[str, os.PathLike[str]], device: Union[str, torch.device] = "cpu") -> None:
    """Swaps the linear layers that a file of ``save_packed`` has packed, and loads all tensors onto a device.

    module: as it was before it was packed, on any device; the meta device saves memory (``with torch.device("meta"): ...``). Raises Error naming file
    and tensor, before anything is changed, where the file is no such file or does not fit the module.
    """
    path = os.fspath(path)
    try:
        with safe_open(path, framework="pt") as file:
            layers = _read_layers(path, file.metadata())
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}
    except (OSError, SafetensorError) as error:
        raise Error(f"{path}: it cannot be read as safetensors: {error}") from None
    swaps = {name: _empty_layer(path, module, name, entry) for name, entry in layers.items()}
    _check_tensors(path, module, swaps, tensors)
    for name, packed in swaps.items():
        parent, _, child = name.rpartition(".")
        setattr(module.get_submodule(parent), child, packed)
    module.load_state_dict(tensors, assign=True)
    module.to(device)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _read_layers(path: str, metadata: Any) -> dict[str, dict[str, Any]]:
    text = (metadata or {}).get(_KEY)
    if text is None:
        raise Error(f"{path}: it has no packed layers; save_packed writes such files")
    try:
        stored = json.loads(text)
        version = stored["version"]
        layers: dict[str, dict[str, Any]] = stored["layers"]
        fields = {"layout": str, "in_features": int, "out_features": int, "bias": bool}
        sound = isinstance(layers, dict) and all(type(entry[key]) is kind for entry in layers.values() for key, kind in fields.items())
    except (ValueError, KeyError, TypeError):
        sound, version = False, _VERSION
    if version != _VERSION:
        raise Error(f"{path}: version {version} of packed layers is not supported, only {_VERSION} is")
    if not sound:
        raise Error(f"{path}: its list of packed layers is damaged")
    return layers


def _empty_layer(path: str, module: nn.Module, name: str, entry: dict[str, Any]) -> PackedLinear:
    if entry["layout"] not in LAYERS:
        raise Error(f'{path}: {name}: unknown layout "{entry["layout"]}"; known are {", ".join(LAYERS)}')
    try:
        old = module.get_submodule(name)
    except AttributeError:
        raise Error(f"{path}: {name}: the module has no such layer") from None
    shape = (entry["out_features"], entry["in_features"])
    if not isinstance(old, (nn.Linear, PackedLinear)) or (old.out_features, old.in_features) != shape or (old.bias is not None) != entry["bias"]:
        wanted = f"Linear(in_features={shape[1]}, out_features={shape[0]}, bias={entry['bias']})"
        raise Error(f"{path}: {name}: the file is of a {wanted}, but the module has {old}")
    return LAYERS[entry["layout"]](shape[1], shape[0], entry["bias"], "meta", old.weight.dtype).train(old.training)


def _check_tensors(path: str, module: nn.Module, swaps: dict[str, PackedLinear], tensors: dict[str, Tensor]) -> None:
    """That the module, once swapped, has these tensors in these shapes."""
    inside = tuple(f"{name}." for name in swaps)
    expected = {name: tensor.shape for name, tensor in module.state_dict().items() if not name.startswith(inside)}
    for layer, packed in swaps.items():
        expected |= {f"{layer}.{name}": tensor.shape for name, tensor in packed.state_dict().items()}
    if missing := sorted(set(expected) - set(tensors)):
        raise Error(f"{path}: it has no tensor {missing[0]}, which the module has")
    if more := sorted(set(tensors) - set(expected)):
        raise Error(f"{path}: it has a tensor {more[0]}, which the module has not")
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise Error(f"{path}: {name}: its shape is {list(tensors[name].shape)}, but the module's is {list(shape)}")
    for layer, packed in swaps.items():
        try:
            packed.check_packed(tensors[f"{layer}.packed"])
        except Error as error:
            raise Error(f"{path}: {layer}.packed: {error}") from None
        if packed.bias is not None and not bool(torch.isfinite(tensors[f"{layer}.bias"]).all()):
            raise Error(f"{path}: {layer}.bias: it is not finite")
