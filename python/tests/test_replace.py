import json
import pathlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lacuna
from lacuna import Fp8Linear, PackedLinear, Sparse24Bf16Linear, Sparse24Fp8Linear


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class Net(nn.Module):
    """A mixture of experts, a matrix shared with an embedding, a layer in two places, and attention of torch."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, width)
        self.router = nn.Linear(width, 3, bias=False)
        self.experts = nn.ModuleList(Expert(width) for _ in range(3))
        self.twice = nn.Linear(width, width)
        self.again = self.twice
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.head = nn.Linear(width, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        weight = self.router(x).softmax(-1)
        x = x + sum(weight[..., e : e + 1] * expert(x) for e, expert in enumerate(self.experts))
        return self.head(self.again(self.twice(x)))


def policy(*rules: tuple[str, str], rest: str = "bf16") -> dict[str, Any]:
    return {"version": 1, "rules": [{"name": name, "layout": layout} for name, layout in rules], "rest": rest}


EXPERTS = policy(("experts.*.up.weight", "nm24_f8"), ("experts.*.down.weight", "nm24_bf16"), ("twice.weight", "f8"), ("again.weight", "f8"))


def snapshot(module: nn.Module) -> list[tuple[str, int]]:
    return [(name, id(one)) for name, one in module.named_modules(remove_duplicate=False)]


@torch.no_grad()
def test_swaps_what_the_policy_names(device: torch.device) -> None:
    net = Net().to(device)
    ids = torch.arange(12, device=device).reshape(2, 6)
    before = net(ids)
    report = lacuna.replace_linears(net, EXPERTS)
    assert [type(expert.up) for expert in net.experts] == [Sparse24Fp8Linear] * 3
    assert [type(expert.down) for expert in net.experts] == [Sparse24Bf16Linear] * 3
    assert type(net.twice) is Fp8Linear and net.again is net.twice
    assert type(net.router) is nn.Linear and net.head.weight is net.embedding.weight
    assert len(report.replaced) == 7 and not report.unused_rules
    up = next(one for one in report.replaced if one.name == "experts.1.up")
    assert (up.layout, up.out_features, up.in_features, up.bytes_before) == ("nm24_f8", 64, 32, 4 * 64 * 32)
    assert up.bytes_after == net.experts[1].up.weight_bytes
    if device.type == "cpu":
        assert up.bytes_after == 64 * (4 + 4 + 16)
    assert {one.name for one in report.left} == {"router", "attention.out_proj", "head"}
    assert report.bytes_after < report.bytes_before
    after = net(ids)
    assert 0 < float((after - before).norm() / before.norm()) < 0.5
    assert net.experts[0].up.training == net.training


def test_says_why_layers_stay() -> None:
    net = Net()
    report = lacuna.replace_linears(net, policy(("router.weight", "source"), rest="f8"))
    reasons = {one.name: one.reason for one in report.left}
    assert reasons["router"] == "the policy keeps it (source)"
    assert reasons["attention.out_proj"] == "it is a NonDynamicallyQuantizableLinear, a subclass of Linear that may use its weight otherwise"
    assert reasons["head"] == "its weight is another layer's too"
    text = str(report)
    assert "f8: 7 layers" in text and "left: 1 layers, 384 bytes: the policy keeps it (source)" in text


def test_masks_and_norms_by_name() -> None:
    net = Net()
    mask = torch.zeros(64, 32, dtype=torch.bool)
    mask[:, ::4] = mask[:, 3::4] = True
    norms = torch.rand(64) + 0.1
    weight = net.experts[0].down.weight.detach().clone()
    lacuna.replace_linears(net, EXPERTS, masks={"experts.2.up.weight": mask}, norms={"experts.0.down": norms})
    assert torch.equal(net.experts[2].up.dequantize() != 0, mask)
    assert torch.equal(net.experts[0].down.packed, Sparse24Bf16Linear.from_weight(weight, norms=norms).packed)
    with pytest.raises(lacuna.Error, match="masks: router: no such layer becomes 2:4"):
        lacuna.replace_linears(Net(), EXPERTS, masks={"router.weight": mask})


def nan_in_the_last(net: Net) -> None:
    net.experts[2].down.weight.data[31, 63] = float("nan")


def double_in_the_last(net: Net) -> None:
    net.experts[2].down.weight.data = net.experts[2].down.weight.data.double()


def on_meta(net: Net) -> None:
    net.experts[2].down.to("meta")


@pytest.mark.parametrize(
    "spoil, words",
    [
        (nan_in_the_last, r"experts\.2\.down\.weight: weight: row 31, input 63 is nan"),
        (double_in_the_last, r"experts\.2\.down\.weight: it is torch.float64"),
        (on_meta, r"experts\.2\.down\.weight: it is on the meta device"),
    ],
)
def test_nothing_is_half_replaced(spoil: Any, words: str) -> None:
    net = Net()
    spoil(net)
    before = snapshot(net)
    with pytest.raises(lacuna.Error, match=words):
        lacuna.replace_linears(net, EXPERTS)
    assert snapshot(net) == before


def test_a_mask_that_is_not_two_of_four_changes_nothing() -> None:
    net = Net()
    before = snapshot(net)
    with pytest.raises(lacuna.Error, match=r"experts\.2\.down\.weight: row 0: the group of four at input 0 keeps 4"):
        lacuna.replace_linears(net, EXPERTS, masks={"experts.2.down": torch.ones(32, 64)})
    assert snapshot(net) == before


@pytest.mark.parametrize(
    "rules, words",
    [
        ("nothing", "neither a policy file nor one of the policies quaspa"),
        ("quaspa", "no linear layer is to be swapped; the module has 10: router, experts.0.up, experts.0.down, ..."),
        (policy(("router.weight", "q4_K")), 'unknown layout "q4_K"'),
        ({"version": 2, "rules": [], "rest": "f8"}, "version 2"),
        (policy(("twice.weight", "f8"), ("again.weight", "nm24_f8")), "twice and again are one layer"),
    ],
)
def test_refuses_policies(rules: Any, words: str) -> None:
    net = Net()
    before = snapshot(net)
    with pytest.raises(lacuna.Error, match=words):
        lacuna.replace_linears(net, rules)
    assert snapshot(net) == before


def test_refuses_a_layer_itself() -> None:
    with pytest.raises(lacuna.Error, match="use from_weight"):
        lacuna.replace_linears(nn.Linear(4, 4), policy(rest="f8"))


def test_reads_policy_files_and_names_unused_rules(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "policy.json"
    file.write_text(json.dumps(policy(("router.weight", "f8"), ("none.weight", "f8"))))
    report = lacuna.replace_linears(Net(), file)
    assert report.unused_rules == ["none.weight"] and len(report.replaced) == 1
    assert "rule none.weight matches no layer" in str(report)


def test_names_of_flux_get_the_papers_layouts() -> None:
    chosen = {
        name: lacuna.Policy.load("quaspa").choose(f"{name}.weight")[0]
        for name in ("transformer_blocks.3.attn.to_q", "transformer_blocks.3.attn.add_q_proj", "single_transformer_blocks.1.proj_out", "proj_out")
    }
    assert list(chosen.values()) == ["nm24_f8", "f8", "nm24_f8", "bf16"]


@torch.no_grad()
@pytest.mark.parametrize("on_meta_first", [False, True])
def test_files_of_packed_weights(tmp_path: pathlib.Path, device: torch.device, on_meta_first: bool) -> None:
    net = Net().to(device)
    lacuna.replace_linears(net, EXPERTS)
    ids = torch.arange(6, device=device)[None]
    expected = net(ids)
    path = tmp_path / "net.safetensors"
    lacuna.save_packed(net, path)
    with torch.device("meta" if on_meta_first else "cpu"):
        other = Net()
    lacuna.load_packed(other, path, device)
    assert torch.equal(other(ids), expected)
    assert type(other.experts[0].up) is Sparse24Fp8Linear and other.again is not None
    lacuna.load_packed(other, path, device)  # into layers that are packed already
    assert torch.equal(other(ids), expected)
    assert list(tmp_path.iterdir()) == [path]


def test_file_that_does_not_fit_changes_nothing(tmp_path: pathlib.Path) -> None:
    net = Net()
    lacuna.replace_linears(net, EXPERTS)
    path = tmp_path / "net.safetensors"
    lacuna.save_packed(net, path)
    other = Net(16)
    before = snapshot(other)
    with pytest.raises(lacuna.Error, match=r"net.safetensors: experts.0.up: the file is of a Linear\(in_features=32, out_features=64"):
        lacuna.load_packed(other, path)
    assert snapshot(other) == before
    with pytest.raises(lacuna.Error, match="the module has no such layer"):
        lacuna.load_packed(nn.ModuleDict({"experts": nn.ModuleList()}), path)
    more = Net()
    more.extra = nn.LayerNorm(4)
    with pytest.raises(lacuna.Error, match="it has no tensor extra.bias"):
        lacuna.load_packed(more, path)
    assert type(more.twice) is nn.Linear
    with pytest.raises(lacuna.Error, match="no packed layer"):
        lacuna.save_packed(Net(), tmp_path / "dense.safetensors")
    data = bytearray(path.read_bytes())
    for broken in (b"", data[:100], data[: len(data) // 2], b"no header"):
        (tmp_path / "broken.safetensors").write_bytes(broken)
        with pytest.raises(lacuna.Error, match="broken.safetensors: it cannot be read as safetensors"):
            lacuna.load_packed(Net(), tmp_path / "broken.safetensors")
    with pytest.raises(lacuna.Error, match="absent.safetensors: it cannot be read"):
        lacuna.load_packed(Net(), tmp_path / "absent.safetensors")
    biased = Net()
    lacuna.replace_linears(biased, EXPERTS)
    layer = next(name for name, one in biased.named_modules() if isinstance(one, PackedLinear) and one.bias is not None)
    biased.get_submodule(layer).bias[0] = float("nan")
    lacuna.save_packed(biased, tmp_path / "nan.safetensors")
    with pytest.raises(lacuna.Error, match=f"nan.safetensors: {layer}.bias: it is not finite"):
        lacuna.load_packed(Net(), tmp_path / "nan.safetensors")
    at = data.find(net.experts[1].down.packed.numpy().tobytes())
    data[at] = 0  # places 0 and 0
    path.write_bytes(data)
    sound = Net()
    before = snapshot(sound)
    with pytest.raises(lacuna.Error, match="experts.1.down.packed: row 0 is not nm24_bf16"):
        lacuna.load_packed(sound, path)
    assert snapshot(sound) == before


def test_a_failed_save_leaves_the_old_file(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    lacuna.replace_linears(net, EXPERTS)
    path = tmp_path / "net.safetensors"
    lacuna.save_packed(net, path)
    before = path.read_bytes()

    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(lacuna.packed_file, "save_file", full)
    with pytest.raises(OSError, match="No space"):
        lacuna.save_packed(net, path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
