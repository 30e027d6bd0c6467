"""A pass of torch's compiler, which by itself repeats equal calls of operators that it does not know."""

from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

_PURE = (torch.ops.lacuna.quantize_per_token.default, torch.ops.aten.view.default, torch.ops.aten.reshape.default)


class SharedQuantization(CustomGraphPass):
    """Layers with the same input, as q, k and v of attention, quantize it once."""

    def __call__(self, graph: fx.Graph) -> None:
        known: dict[Any, fx.Node] = {}
        for node in graph.nodes:
            if node.op != "call_function" or node.target not in _PURE or node.kwargs:
                continue
            first = known.setdefault((node.target, _hashable(node.args)), node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


def _hashable(argument: Any) -> Any:
    return tuple(_hashable(one) for one in argument) if isinstance(argument, (list, tuple)) else argument
