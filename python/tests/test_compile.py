import subprocess
import sys
from pathlib import Path
from typing import Any, Callable

import pytest
import torch
from reference import LAYERS
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import lacuna
from lacuna import Fp8Linear, PackedLinear, Sparse24Fp8Linear

# On the CPU the graph is traced and run as it is: what inductor makes of other operators is not ours, and its C++ compiles slowly.
BACKENDS = {"cpu": "aot_eager", "cuda": "inductor"}


def mlp(device: torch.device) -> nn.Module:
    net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.LayerNorm(32), nn.Linear(32, 8))
    rules = [{"name": "0.weight", "layout": "nm24_f8"}, {"name": "2.weight", "layout": "f8"}, {"name": "4.weight", "layout": "nm24_bf16"}]
    lacuna.replace_linears(net, {"version": 1, "rules": rules, "rest": "source"})
    return net.to(device)


def test_operators_keep_their_contracts() -> None:
    x = torch.randn(5, 24)
    torch.library.opcheck(torch.ops.lacuna.quantize_per_token, (x,))
    for layer_type in LAYERS:
        layer = layer_type.from_weight(torch.randn(16, 24), torch.randn(16))
        for bias in (layer.bias, None):
            torch.library.opcheck(torch.ops.lacuna.packed_linear, (x, layer.packed, bias, layer.layout, torch.bfloat16))


@pytest.mark.parametrize("layer_type", LAYERS)
def test_operators_of_cuda_keep_their_contracts(device: torch.device, layer_type: type[PackedLinear]) -> None:
    if device.type == "cpu":
        return
    layer = layer_type.from_weight(torch.randn(16, 32), torch.randn(16)).to(device)
    x, x_scale, scale = torch.randn(5, 32, device=device, dtype=torch.bfloat16), None, None
    torch.library.opcheck(torch.ops.lacuna.quantize_per_token, (x,))
    if layer.scaled:
        (x, x_scale), scale = torch.ops.lacuna.quantize_per_token(x), layer.block_scale
    arguments = (x, x_scale, layer.blocks, scale, layer.bias, layer.layout, 16, 32, torch.bfloat16, "fast")
    torch.library.opcheck(torch.ops.lacuna.tensor_core_linear, arguments)


@torch.no_grad()
def test_compiles_without_graph_breaks(device: torch.device) -> None:
    net = mlp(device)
    x = torch.randn(6, 32, device=device)
    expected = net(x)
    counter = CompileCounter()
    torch.compile(net, backend=counter, fullgraph=True)(x)
    assert counter.frame_count == 1
    torch.compiler.reset()
    compiled = torch.compile(net, backend=BACKENDS[device.type], fullgraph=True)
    torch.testing.assert_close(compiled(x), expected, rtol=1e-2, atol=1e-2)  # a norm that is fused may round a token to other codes
    torch.compiler.reset()


@torch.no_grad()
def test_any_number_of_tokens_with_one_graph(device: torch.device) -> None:
    net = mlp(device)
    counter = CompileCounter()
    compiled = torch.compile(net, backend=counter, fullgraph=True, dynamic=True)
    for M in (3, 4, 17):
        x = torch.randn(M, 32, device=device)
        assert torch.equal(compiled(x), net(x))
    assert counter.frame_count == 1
    torch.compiler.reset()


@torch.no_grad()
def test_inductor() -> None:
    """Of the CPU's layers, by inductor's own C++."""
    net = nn.Sequential(Fp8Linear.from_weight(torch.randn(16, 16)), nn.ReLU(), Sparse24Fp8Linear.from_weight(torch.randn(8, 16)))
    x = torch.randn(4, 16)
    assert torch.equal(torch.compile(net, fullgraph=True)(x), net(x))
    torch.compiler.reset()


def test_fake_tensors_of_cuda_have_the_right_shapes() -> None:
    """What torch.compile sees of the operators of CUDA, which needs no device."""
    x = torch.empty(7, 33, dtype=torch.bfloat16, device="meta")
    codes, scale = torch.ops.lacuna.quantize_per_token(x)
    assert codes.shape == (7, 48) and codes.dtype == torch.uint8 and scale.shape == (7,) and scale.dtype == torch.float32
    blocks = torch.empty(0, dtype=torch.uint8, device="meta")
    y = torch.ops.lacuna.tensor_core_linear(codes, scale, blocks, None, None, "f8", 20, 33, torch.float16, "fast")
    assert y.shape == (7, 20) and y.dtype == torch.float16


def recorded(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of a call, made after one that warms up, and what its replays write."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call()
    return graph, output


@torch.no_grad()
def test_a_cuda_graph_replays(device: torch.device) -> None:
    if device.type == "cpu":
        return
    layers = [layer_type.from_weight(torch.randn(128, 64), torch.randn(128)).to(device) for layer_type in LAYERS]
    x = torch.randn(16, 64, device=device, dtype=torch.bfloat16)
    graph, outputs = recorded(lambda: [layer(x) for layer in layers])
    for _ in range(3):
        x.normal_()
        for output in outputs:
            output.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(output, layer(x)) for output, layer in zip(outputs, layers))


@torch.no_grad()
def test_compiled_with_cuda_graphs(device: torch.device) -> None:
    if device.type == "cpu":
        return
    net = mlp(device)
    compiled = torch.compile(net, mode="reduce-overhead", fullgraph=True)
    for _ in range(4):  # the second call records, later ones replay
        x = torch.randn(6, 32, device=device)
        torch.testing.assert_close(compiled(x).clone(), net(x), rtol=1e-2, atol=1e-2)
    torch.compiler.reset()


@torch.no_grad()
@pytest.mark.parametrize("layer_type", LAYERS)
def test_work_is_on_the_current_stream(device: torch.device, layer_type: type[PackedLinear]) -> None:
    """Kernels on another stream would read x before it is there, and memory that is used again."""
    if device.type == "cpu":
        return
    layer = layer_type.from_weight(torch.randn(256, 256), torch.randn(256)).to(device)
    value = torch.randn(512, 256, device=device, dtype=torch.bfloat16)
    expected = layer(value)
    x = torch.full_like(value, float("nan"))
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)  # clocks: about 50 ms
        x.copy_(value)
        y = layer(x)
        x.fill_(float("nan"))
        seen = y.clone()
        y.fill_(float("nan"))
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(seen, expected)


@torch.no_grad()
def test_many_layers_without_waiting_give_the_same_bits(device: torch.device) -> None:
    """Memory of codes and outputs is used again at once: a kernel that began before the one before it ended would spoil them."""
    if device.type == "cpu":
        return
    net = nn.Sequential(*(layer_type.from_weight(torch.randn(1024, 1024) / 32) for _ in range(4) for layer_type in LAYERS)).to(device)
    x = torch.randn(1500, 1024, device=device, dtype=torch.bfloat16)
    expected = x
    for layer in net:
        expected = layer(expected)
        torch.cuda.synchronize()
    for _ in range(20):
        assert torch.equal(net(x), expected)


class SharedInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (Fp8Linear.from_weight(torch.randn(32, 32)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.q(x) + self.k(x) + self.v(x)


def calls_of_quantization(call: Callable[[], Any]) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return sum(event.count for event in profile.key_averages() if event.key == "lacuna::quantize_per_token")


@torch.no_grad()
def test_compiled_layers_that_share_an_input_quantize_it_once(device: torch.device) -> None:
    if device.type == "cpu":  # there each product quantizes for itself
        return
    net, x = SharedInput().to(device), torch.randn(8, 32, device=device)
    expected = net(x)
    assert calls_of_quantization(lambda: net(x)) == 3
    compiled = torch.compile(net, fullgraph=True, options=lacuna.compile_options())
    torch.testing.assert_close(compiled(x), expected)
    assert calls_of_quantization(lambda: compiled(x)) == 1
    torch.compiler.reset()


@torch.no_grad()
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_options_join_equal_quantizations_only(device: torch.device, dynamic: bool) -> None:
    def quantize(x: Tensor) -> list[Tensor]:
        inputs = [x, x, 2 * x, x.flip(-1), x]
        return [part for one in inputs for part in torch.ops.lacuna.quantize_per_token(one.reshape(-1, x.shape[-1]))]

    compiled = torch.compile(quantize, fullgraph=True, dynamic=dynamic, options=lacuna.compile_options())
    for M in (3, 4):
        x = torch.randn(M, 2, 32, device=device)
        assert all(torch.equal(a, b) for a, b in zip(compiled(x), quantize(x)))
        assert calls_of_quantization(lambda: compiled(x)) == 3  # noqa: B023
    torch.compiler.reset()


def test_a_forked_process_computes() -> None:
    """Threads do not survive a fork: a child makes its own."""
    text = """
import os, torch, lacuna
torch.set_num_threads(1)
layer, x = lacuna.Fp8Linear.from_weight(torch.randn(256, 256)), torch.randn(64, 256)
expected = layer(x)
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(layer(x), expected) else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", text], timeout=120, cwd=Path(__file__).parent)
    assert done.returncode == 0
