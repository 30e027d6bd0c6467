"""Swaps the linear layers of a module by a policy."""

import json
import os
from collections import Counter
from dataclasses import dataclass, field
from typing import Mapping, Optional, Union

from torch import Tensor, nn

from lacuna._core import Error, Policy
from lacuna.linear import LAYERS, PackedLinear, check_weight
from lacuna.ops import check_device

_SHOWN = 3  # names in a message


@dataclass(frozen=True)
class Replaced:
    """A layer that was swapped. Bytes are of the weight."""

    name: str
    layout: str
    out_features: int
    in_features: int
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class Left:
    """A linear layer that stayed, and why. bytes: of the weight."""

    name: str
    reason: str
    bytes: int


@dataclass
class Report:
    """What ``replace_linears`` did. Printed, it is a table."""

    replaced: list[Replaced] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    unused_rules: list[str] = field(default_factory=list)  # of a policy that is not built in

    @property
    def bytes_before(self) -> int:
        """Of all linear layers' weights."""
        return sum(one.bytes_before for one in self.replaced) + sum(one.bytes for one in self.left)

    @property
    def bytes_after(self) -> int:
        return sum(one.bytes_after for one in self.replaced) + sum(one.bytes for one in self.left)

    def __str__(self) -> str:
        lines = []
        for layout, count in Counter(one.layout for one in self.replaced).items():
            of_it = [one for one in self.replaced if one.layout == layout]
            before, after = sum(one.bytes_before for one in of_it), sum(one.bytes_after for one in of_it)
            lines.append(f"{layout}: {count} layers, {before} -> {after} bytes")
        for reason, count in Counter(one.reason for one in self.left).items():
            lines.append(f"left: {count} layers, {sum(one.bytes for one in self.left if one.reason == reason)} bytes: {reason}")
        lines += [f"rule {rule} matches no layer" for rule in self.unused_rules]
        lines.append(f"weights of linear layers: {self.bytes_before} -> {self.bytes_after} bytes")
        return "\n".join(lines)


@dataclass
class _Planned:
    names: list[str]  # all under which the module has it
    linear: nn.Linear
    layout: str


def load_policy(policy: Union[str, os.PathLike[str], Mapping[str, object], Policy]) -> Policy:
    """A policy that is built in, a JSON file, or what such a file holds."""
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, Mapping):
        return Policy.parse(json.dumps(policy), "policy")
    return Policy.load(os.fspath(policy))


def replace_linears(
    module: nn.Module,
    policy: Union[str, os.PathLike[str], Mapping[str, object], Policy] = "quaspa",
    *,
    masks: Optional[Mapping[str, Tensor]] = None,
    norms: Optional[Mapping[str, Tensor]] = None,
) -> Report:
    """Swaps the nn.Linear layers of a module, experts' too, for those that a policy names, in place; returns what it did.

    policy: "quaspa", "f8", "nm24_bf16", a JSON file or a dict of its form (docs/image.md, "Policies"); its rules name weights, such as
    "transformer_blocks.*.attn.to_q.weight". Layers of the layouts f8, nm24_f8 and nm24_bf16 are swapped; those of bf16, f16, f32 and source stay as they
    are. masks: of weights by their names, [N, K], two of every four true; norms: the L2 norms of inputs by the weights' names, [K], for Wanda; weights
    that are in neither are masked by magnitude. The keys may end in ".weight" or not.

    Layers stay, and the report says why, where they are a subclass of nn.Linear or share their weight with something else. Raises Error, before
    anything is swapped, for weights that are not finite or whose type, shape or card no layer serves, for a mask that is not 2:4, and where no layer is
    to be swapped. While it works, memory holds the old and the new weights; to spare a card's memory swap on the CPU, then move the module.
    """
    rules = load_policy(policy)
    report = Report()
    planned = _plan(module, rules, report)
    masks, norms = _by_module(masks, "masks"), _by_module(norms, "norms")
    _refuse_unknown(planned, masks, "masks")
    _refuse_unknown(planned, norms, "norms")
    if not planned:
        names = [name for name, one in module.named_modules() if isinstance(one, nn.Linear)]
        shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
        raise Error(f"policy {rules.name}: no linear layer is to be swapped; the module has {len(names)}: {shown or 'none'}")
    swaps: list[tuple[_Planned, PackedLinear]] = []
    for one in planned:
        check_weight(one.linear.weight, one.linear.bias, f"{one.names[0]}.weight")
        check_device(one.linear.weight.device, one.layout, one.names[0])
    for one in planned:
        swaps.append((one, _pack(one, masks, norms)))
    for one, packed in swaps:
        for name in one.names:
            parent, _, child = name.rpartition(".")
            setattr(module.get_submodule(parent), child, packed)
    for one, packed in swaps:
        before = one.linear.weight.numel() * one.linear.weight.element_size()
        N, K = packed.out_features, packed.in_features
        report.replaced += [Replaced(one.names[0], packed.layout, N, K, before, packed.weight_bytes)]
    return report


def _plan(module: nn.Module, rules: Policy, report: Report) -> list[_Planned]:
    """Layers to swap; those that stay go to the report. Nothing is changed."""
    names_of: dict[nn.Linear, list[str]] = {}
    for name, one in module.named_modules(remove_duplicate=False):
        if isinstance(one, nn.Linear):
            names_of.setdefault(one, []).append(name)
    if module in names_of:
        raise Error(f"the module is a {type(module).__name__} itself; use from_weight of the layer that is to replace it")
    holders = Counter(id(one) for _, one in _each_parameter(module))
    used: set[int] = set()
    planned = []
    for linear, names in names_of.items():
        choices = [rules.choose(f"{name}.weight") for name in names]
        used |= {rule for _, rule in choices}
        layouts = {layout for layout, _ in choices}
        if len(layouts) > 1:
            raise Error(f"{' and '.join(names)} are one layer, to which policy {rules.name} gives different layouts")
        layout = layouts.pop()
        if layout not in LAYERS:
            reason = f"the policy keeps it ({layout or 'source'})"
        elif type(linear) is not nn.Linear:
            reason = f"it is a {type(linear).__name__}, a subclass of Linear that may use its weight otherwise"
        elif holders[id(linear.weight)] > 1:
            reason = "its weight is another layer's too"
        else:
            planned.append(_Planned(names, linear, layout))
            continue
        report.left.append(Left(names[0], reason, linear.weight.numel() * linear.weight.element_size()))
    if not rules.built_in:
        report.unused_rules = [rule for i, rule in enumerate(rules.rules) if i not in used]
    return planned


def _each_parameter(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Of each module once, though several may hold one parameter."""
    return [pair for one in module.modules() for pair in one.named_parameters(recurse=False, remove_duplicate=False)]


def _by_module(tensors: Optional[Mapping[str, Tensor]], what: str) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for name, tensor in (tensors or {}).items():
        key = name.removesuffix(".weight")
        if key in out:
            raise Error(f"{what}: {key} is there twice")
        out[key] = tensor
    return out


def _refuse_unknown(planned: list[_Planned], tensors: Mapping[str, Tensor], what: str) -> None:
    known = {name for one in planned if LAYERS[one.layout].sparse for name in one.names}
    unknown = sorted(set(tensors) - known)
    if unknown:
        shown = ", ".join(unknown[:_SHOWN]) + (", ..." if len(unknown) > _SHOWN else "")
        raise Error(f"{what}: {shown}: no such layer becomes 2:4; leave out what is not used")


def _pack(one: _Planned, masks: Mapping[str, Tensor], norms: Mapping[str, Tensor]) -> PackedLinear:
    mask = next((masks[name] for name in one.names if name in masks), None)
    norm = next((norms[name] for name in one.names if name in norms), None)
    out = LAYERS[one.layout].from_weight(one.linear.weight, one.linear.bias, mask, norm, name=f"{one.names[0]}.weight")
    return out.train(one.linear.training)
