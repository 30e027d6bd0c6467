#!/usr/bin/env python3
"""Makes tests/fixtures/flux_tiny: tiny FLUX.1-type transformers with random weights and what diffusers computes with them.

Needs Python packages: torch==2.7.1 diffusers==0.35.2 transformers==4.56.2 accelerate safetensors. Run: make_flux_fixture.py [OUT]

Each folder `dev`, `schnell`, `moe` holds one net (config.json, weights in BF16). `original` holds the weights of `dev` under
the names of the first release. `CASE.safetensors` holds for one set of inputs:
  in.NAME       inputs, F32; exact in BF16 where a BF16 run follows
  f64.NAME      outputs of modules in double precision, rounded to F32 once; casts to float32 inside diffusers are lifted
  error.NAME    [1] the largest distance from that of a float32 run whose timestep embedding is computed in double and
                then rounded
  f32.sample    the net's output in float32, by diffusers as it is
  bf16.sample   the net's output with weights and activations in BF16
`norms_CASE.safetensors` holds what the linear layers read in that case, over all samples (and steps of the loop):
  f64.NAME.weight.norm     [K] L2 norms of the inputs' columns in double precision; of experts only routed tokens
  f64.NAME.second_moment   [K, K] X^T X / tokens, of one layer
  error.*                  [1] as above
`denoise.safetensors` holds a loop of four steps of FlowMatchEulerDiscreteScheduler with FLUX.1-dev's settings,
`sigmas.json` the noise levels of several such loops.
"""

import contextlib
import copy
import json
import math
import pathlib
import shutil
import sys

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from diffusers.models import embeddings
from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from safetensors.torch import load_file, save_file

ROOT = pathlib.Path(__file__).resolve().parent.parent

NETS = {
    "dev": dict(num_layers=2, num_single_layers=2, num_attention_heads=3, attention_head_dim=10, axes_dims_rope=(2, 4, 4),
                in_channels=8, joint_attention_dim=20, pooled_projection_dim=14, guidance_embeds=True),
    "schnell": dict(num_layers=1, num_single_layers=1, num_attention_heads=2, attention_head_dim=16, axes_dims_rope=(4, 6, 6),
                    in_channels=8, joint_attention_dim=24, pooled_projection_dim=10, guidance_embeds=False),
    "moe": dict(num_layers=1, num_single_layers=1, num_attention_heads=2, attention_head_dim=16, axes_dims_rope=(4, 6, 6),
                in_channels=8, joint_attention_dim=24, pooled_projection_dim=10, guidance_embeds=False),
}
MOE = dict(moe_num_experts=4, moe_top_k=2, moe_intermediate_size=24, moe_norm_topk_prob=True)
# FLUX.1-dev's scheduler_config.json
DEV_SCHEDULE = dict(num_train_timesteps=1000, shift=3.0, use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15,
                    base_image_seq_len=256, max_image_seq_len=4096)
SCHNELL_SCHEDULE = dict(num_train_timesteps=1000, shift=1.0, use_dynamic_shifting=False)


class Expert(torch.nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        first = torch.nn.Module()
        first.proj = torch.nn.Linear(width, inner)
        self.net = torch.nn.ModuleList([first, torch.nn.Identity(), torch.nn.Linear(inner, width)])

    def forward(self, x):
        return self.net[2](torch.nn.functional.gelu(self.net[0].proj(x), approximate="tanh"))


class Experts(torch.nn.Module):
    """Softmax over all experts, the top k of them with their probabilities divided by their sum. Every expert runs on
    every token: plain, not economical."""

    def __init__(self, width):
        super().__init__()
        self.gate = torch.nn.Linear(width, MOE["moe_num_experts"], bias=False)
        self.experts = torch.nn.ModuleList(
            Expert(width, MOE["moe_intermediate_size"]) for _ in range(MOE["moe_num_experts"]))

    def forward(self, x):
        probability = torch.softmax(self.gate(x), dim=-1)
        best, index = torch.topk(probability, MOE["moe_top_k"], dim=-1)
        best = best / best.sum(dim=-1, keepdim=True)
        weight = torch.zeros_like(probability).scatter(-1, index, best)
        return sum(weight[..., e:e + 1] * expert(x) for e, expert in enumerate(self.experts))


class SingleBlockWithExperts(FluxSingleTransformerBlock):
    """Attention and experts are added, not joined by one matrix."""

    def become(self, width):
        del self.proj_mlp
        self.proj_out = torch.nn.Linear(width, width)
        self.ff = Experts(width)

    def forward(self, hidden_states, encoder_hidden_states, temb, image_rotary_emb=None, joint_attention_kwargs=None):
        text = encoder_hidden_states.shape[1]
        x = torch.cat([encoder_hidden_states, hidden_states], dim=1)
        normed, gate = self.norm(x, emb=temb)
        attention = self.attn(hidden_states=normed, image_rotary_emb=image_rotary_emb)
        x = x + gate.unsqueeze(1) * (self.proj_out(attention) + self.ff(normed))
        return x[:, :text], x[:, text:]


def make_net(name, seed):
    torch.manual_seed(seed)
    net = FluxTransformer2DModel(**NETS[name])
    width = net.config.num_attention_heads * net.config.attention_head_dim
    if name == "moe":
        for block in net.transformer_blocks:
            block.ff = Experts(width)
        for block in net.single_transformer_blocks:
            block.__class__ = SingleBlockWithExperts
            block.become(width)
    with torch.no_grad():
        for key, value in net.named_parameters():
            if value.dim() == 2:
                value.copy_(torch.randn_like(value) / math.sqrt(value.shape[1]))
            elif "norm_" in key and key.endswith("weight"):
                value.copy_(1 + 0.25 * torch.randn_like(value))
            else:
                value.copy_(0.25 * torch.randn_like(value))
            value.copy_(value.bfloat16().float())
    return net.eval()


def original_names(weights, config):
    """The same weights as the first release of FLUX.1 names and joins them."""
    out = {}

    def both(theirs, *ours):
        for kind in ("weight", "bias"):
            out[f"{theirs}.{kind}"] = torch.cat([weights[f"{name}.{kind}"] for name in ours])

    both("img_in", "x_embedder")
    both("txt_in", "context_embedder")
    embedders = [("time_in", "timestep_embedder"), ("vector_in", "text_embedder")]
    if config["guidance_embeds"]:
        embedders.append(("guidance_in", "guidance_embedder"))
    for theirs, ours in embedders:
        both(f"{theirs}.in_layer", f"time_text_embed.{ours}.linear_1")
        both(f"{theirs}.out_layer", f"time_text_embed.{ours}.linear_2")
    for i in range(config["num_layers"]):
        ours, theirs = f"transformer_blocks.{i}.", f"double_blocks.{i}."
        for stream, norm, attention, projections, end, mlp in (
                ("img", "norm1", "norm_", ("to_q", "to_k", "to_v"), "to_out.0", "ff"),
                ("txt", "norm1_context", "norm_added_", ("add_q_proj", "add_k_proj", "add_v_proj"), "to_add_out", "ff_context")):
            both(f"{theirs}{stream}_mod.lin", f"{ours}{norm}.linear")
            both(f"{theirs}{stream}_attn.qkv", *(f"{ours}attn.{p}" for p in projections))
            out[f"{theirs}{stream}_attn.norm.query_norm.scale"] = weights[f"{ours}attn.{attention}q.weight"]
            out[f"{theirs}{stream}_attn.norm.key_norm.scale"] = weights[f"{ours}attn.{attention}k.weight"]
            both(f"{theirs}{stream}_attn.proj", f"{ours}attn.{end}")
            both(f"{theirs}{stream}_mlp.0", f"{ours}{mlp}.net.0.proj")
            both(f"{theirs}{stream}_mlp.2", f"{ours}{mlp}.net.2")
    for i in range(config["num_single_layers"]):
        ours, theirs = f"single_transformer_blocks.{i}.", f"single_blocks.{i}."
        both(f"{theirs}modulation.lin", f"{ours}norm.linear")
        both(f"{theirs}linear1", f"{ours}attn.to_q", f"{ours}attn.to_k", f"{ours}attn.to_v", f"{ours}proj_mlp")
        both(f"{theirs}linear2", f"{ours}proj_out")
        out[f"{theirs}norm.query_norm.scale"] = weights[f"{ours}attn.norm_q.weight"]
        out[f"{theirs}norm.key_norm.scale"] = weights[f"{ours}attn.norm_k.weight"]
    for kind in ("weight", "bias"):
        scale, shift = weights[f"norm_out.linear.{kind}"].chunk(2)
        out[f"final_layer.adaLN_modulation.1.{kind}"] = torch.cat([shift, scale])
    both("final_layer.linear", "proj_out")
    return {key: value.contiguous() for key, value in out.items()}


def timestep_embedding(timesteps, dim, flip_sin_to_cos=False, downscale_freq_shift=1, scale=1, max_period=10000):
    """diffusers' get_timestep_embedding in double precision."""
    half = dim // 2
    exponent = -math.log(max_period) * torch.arange(half, dtype=torch.float64) / (half - downscale_freq_shift)
    angle = scale * timesteps[:, None].double() * torch.exp(exponent)
    parts = [torch.sin(angle), torch.cos(angle)]
    return torch.cat(parts[::-1] if flip_sin_to_cos else parts, dim=-1)


@contextlib.contextmanager
def replaced(owner, name, value):
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


def exact_time():
    """Frequencies in float32 turn a timestep of 1000 by angles that are off by 3e-5, far more than all that follows."""
    return replaced(embeddings, "get_timestep_embedding", timestep_embedding)


@contextlib.contextmanager
def no_float32():
    """Lifts what diffusers rounds to float32 on the way, so that a double net computes in double throughout."""
    with exact_time(), replaced(torch.Tensor, "float", lambda self: self.double()):
        yield


def run(net, inputs, dtype):
    """Outputs of the modules by name."""
    net = copy.deepcopy(net).to(dtype)
    seen, hooks = {}, []

    def watch(name, module, both):
        def hook(_module, _args, output):
            if both:
                seen[name + ".text"], seen[name] = output
            else:
                seen[name] = output
        hooks.append(module.register_forward_hook(hook))

    for name in ("x_embedder", "context_embedder", "time_text_embed", "norm_out"):
        watch(name, getattr(net, name), False)
    for kind in ("transformer_blocks", "single_transformer_blocks"):
        for i, block in enumerate(getattr(net, kind)):
            watch(f"{kind}.{i}", block, True)
    with torch.no_grad():
        seen["sample"] = net(**{key: value.to(dtype) for key, value in inputs.items()}, return_dict=False)[0]
    for hook in hooks:
        hook.remove()
    return {key: value.detach().clone() for key, value in seen.items()}


def expert_masks(net):
    """Hooks that keep which tokens each expert gets: name of an expert -> [tokens] of the last call."""
    masks = {}

    def watch(name, experts):
        def hook(_module, args):
            best = torch.topk(torch.nn.functional.linear(args[0], experts.gate.weight), MOE["moe_top_k"], dim=-1).indices
            for e in range(MOE["moe_num_experts"]):
                masks[f"{name}.experts.{e}."] = (best == e).any(dim=-1).flatten()
        experts.register_forward_pre_hook(hook)

    for name, module in net.named_modules():
        if isinstance(module, Experts):
            watch(name, module)
    return masks


def watch_inputs(net):
    """Hooks that add up X^T X of every linear layer's inputs: name -> [K, K], and their tokens."""
    masks, moments, tokens = expert_masks(net), {}, {}

    def watch(name, module):
        def hook(_module, args):
            x = args[0].reshape(-1, args[0].shape[-1])
            for expert, mask in masks.items():
                if name.startswith(expert):
                    x = x[mask]
            moments[name] = moments.get(name, 0) + x.double().T @ x.double()
            tokens[name] = tokens.get(name, 0) + len(x)
        module.register_forward_pre_hook(hook)

    for name, module in net.named_modules():
        if isinstance(module, torch.nn.Linear):
            watch(name, module)
    return moments, tokens


MOMENT_OF = "transformer_blocks.0.attn.to_out.0"


def write_norms(path, net, work):
    """work(net, dtype): runs the net."""
    def gather(dtype):
        model = copy.deepcopy(net).to(dtype)
        moments, tokens = watch_inputs(model)
        with torch.no_grad():
            work(model, dtype)
        out = {f"{name}.weight.norm": moment.diagonal().sqrt() for name, moment in moments.items() if tokens[name] > 0}
        out[MOMENT_OF + ".weight.second_moment"] = moments[MOMENT_OF] / tokens[MOMENT_OF]
        return out

    with no_float32():
        truth = gather(torch.float64)
    with exact_time():
        single = gather(torch.float32)
    out = {}
    for key, value in truth.items():
        out[f"f64.{key}"] = value.to(torch.float32).contiguous()
        out[f"error.{key}"] = (single[key] - value).abs().max().reshape(1).to(torch.float32)
    save_file(out, path)


def image_ids(height, width):
    return FluxPipeline._prepare_latent_image_ids(1, height, width, "cpu", torch.float32)


def make_inputs(net, batch, text, height, width, timestep, guidance, seed):
    torch.manual_seed(seed)
    config = net.config
    inputs = dict(
        hidden_states=torch.randn(batch, height * width, config.in_channels).bfloat16().float(),
        encoder_hidden_states=torch.randn(batch, text, config.joint_attention_dim).bfloat16().float(),
        pooled_projections=torch.randn(batch, config.pooled_projection_dim).bfloat16().float(),
        timestep=torch.tensor(timestep),
        img_ids=image_ids(height, width),
        txt_ids=torch.zeros(text, 3),
    )
    if config.guidance_embeds:
        inputs["guidance"] = torch.tensor(guidance)
    return inputs


def write_case(path, net, inputs, bf16):
    with no_float32():
        truth = run(net, inputs, torch.float64)
    with exact_time():
        single = run(net, inputs, torch.float32)
    out = {f"in.{key}": value for key, value in inputs.items()}
    for key, value in truth.items():
        out[f"f64.{key}"] = value.to(torch.float32)
        out[f"error.{key}"] = (single[key].double() - value).abs().max().reshape(1).to(torch.float32)
    out["f32.sample"] = run(net, inputs, torch.float32)["sample"]
    if bf16:
        out["bf16.sample"] = run(net, inputs, torch.bfloat16)["sample"].to(torch.float32)
    save_file({key: value.contiguous() for key, value in out.items()}, path)


def write_case_norms(path, net, inputs):
    write_norms(path, net, lambda model, dtype: model(**{key: value.to(dtype) for key, value in inputs.items()}))


def schedule(settings, steps, tokens):
    scheduler = FlowMatchEulerDiscreteScheduler(**settings)
    mu = calculate_shift(tokens, settings.get("base_image_seq_len", 256), settings.get("max_image_seq_len", 4096),
                         settings.get("base_shift", 0.5), settings.get("max_shift", 1.15))
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
    return scheduler


def write_denoise(path, net, height, width, steps):
    """Latents [1, C, height, width] through `steps` steps as FluxPipeline takes them."""
    torch.manual_seed(77)
    channels = net.config.in_channels // 4
    latents = torch.randn(1, channels, height, width)
    packed = FluxPipeline._pack_latents(latents, 1, channels, height, width)
    inputs = make_inputs(net, 1, 7, height // 2, width // 2, [1.0], [3.5], 78)
    scheduler = schedule(DEV_SCHEDULE, steps, packed.shape[1])

    def loop(model, dtype):
        x = packed.to(dtype)
        stepper = copy.deepcopy(scheduler)  # counts its steps
        with torch.no_grad():
            for i, t in enumerate(scheduler.timesteps):
                arguments = {key: value.to(dtype) for key, value in inputs.items()}
                arguments.update(hidden_states=x, timestep=(t.expand(1) / 1000).to(dtype))
                velocity = model(**arguments, return_dict=False)[0]
                if dtype == torch.float64:
                    x = x + (scheduler.sigmas[i + 1].double() - scheduler.sigmas[i].double()) * velocity
                else:
                    x = stepper.step(velocity, t, x, return_dict=False)[0]
        return x

    with no_float32():
        truth = loop(copy.deepcopy(net).double(), torch.float64)
    with exact_time():
        single = loop(copy.deepcopy(net), torch.float32)
    write_norms(path.with_name("norms_denoise.safetensors"), net, loop)
    save_file({
        "in.latents": latents,
        "in.prompt_embeds": inputs["encoder_hidden_states"],
        "in.pooled_prompt_embeds": inputs["pooled_projections"],
        "in.guidance": inputs["guidance"],
        "packed": packed.contiguous(),
        "sigmas": scheduler.sigmas.contiguous(),
        "f64.latents": truth.to(torch.float32).contiguous(),
        "error.latents": (single.double() - truth).abs().max().reshape(1).to(torch.float32),
        "f64.unpacked": FluxPipeline._unpack_latents(truth, height * 8, width * 8, 8).to(torch.float32).contiguous(),
    }, path)


def save_net(net, name, folder):
    if name != "moe":
        copy.deepcopy(net).to(torch.bfloat16).save_pretrained(folder)
        return
    folder.mkdir()
    weights = {key: value.to(torch.bfloat16).contiguous() for key, value in net.state_dict().items()}
    save_file(weights, folder / "diffusion_pytorch_model.safetensors")
    config = {"_class_name": "FluxTransformer2DModel", "patch_size": 1, **NETS[name], **MOE}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main():
    out = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "tests" / "fixtures" / "flux_tiny"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    torch.set_num_threads(1)
    nets = {name: make_net(name, seed) for seed, name in enumerate(NETS)}
    for name, net in nets.items():
        save_net(net, name, out / name)
    original = out / "original"
    original.mkdir()
    weights = load_file(out / "dev" / "diffusion_pytorch_model.safetensors")
    save_file(original_names(weights, NETS["dev"]), original / "flux1-dev.safetensors")
    shutil.copy(out / "dev" / "config.json", original)
    for case, name, batch, text, height, width, timestep, guidance, bf16 in (
            ("dev", "dev", 2, 7, 2, 3, [0.5, 0.25], [4.0, 2.0], True),
            ("dev_text1", "dev", 1, 1, 3, 5, [0.7531], [3.5], False),
            ("dev_text77", "dev", 1, 77, 1, 5, [0.0123], [7.25], False),
            ("schnell", "schnell", 1, 5, 4, 2, [1.0], None, True),
            ("moe", "moe", 1, 6, 3, 4, [0.5], None, True)):
        inputs = make_inputs(nets[name], batch, text, height, width, timestep, guidance, 5)
        write_case(out / f"{case}.safetensors", nets[name], inputs, bf16)
        if case in ("dev", "moe"):
            write_case_norms(out / f"norms_{case}.safetensors", nets[name], inputs)
    write_denoise(out / "denoise.safetensors", nets["dev"], 4, 6, 4)
    levels = [dict(settings=settings, steps=steps, tokens=tokens,
                   sigmas=[float(s) for s in schedule(settings, steps, tokens).sigmas])
              for settings in (DEV_SCHEDULE, SCHNELL_SCHEDULE) for steps, tokens in ((1, 6), (4, 1024), (28, 4096), (5, 16384))]
    (out / "sigmas.json").write_text(json.dumps(levels) + "\n")


if __name__ == "__main__":
    main()
