#!/usr/bin/env python3
"""Relative errors of FP8 and 2:4 by block and layer: a FLUX.1-type net of random weights (diffusers' FluxTransformer2DModel, width 1024, 2 double and 4 single
blocks), compressed by each policy and by masks from its own inputs, against the original on the same inputs (`lacuna image compress`, `calibrate`, `errors`).
Random weights have no large channels, so that these are what the formats cost, not what a trained net loses. Needs diffusers, torch and safetensors.
Prints tables; --out keeps {command, commit, date, rows}."""
import argparse
import datetime
import json
import pathlib
import shlex
import subprocess
import sys
import tempfile

CASES = {"f8": ("f8", "magnitude"), "nm24_bf16": ("nm24_bf16", "magnitude"), "quaspa": ("quaspa", "magnitude"), "quaspa, wanda": ("quaspa", "wanda")}


def run(*command) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"error: {shlex.join(map(str, command))}: {done.stderr.strip()}")
    return done.stdout


def make(folder: pathlib.Path, seed: int) -> tuple[pathlib.Path, pathlib.Path, pathlib.Path]:
    """The net, inputs to compare on, and others to calibrate on."""
    import torch
    from diffusers import FluxTransformer2DModel
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    net = FluxTransformer2DModel(num_layers=2, num_single_layers=4, num_attention_heads=8, attention_head_dim=128, joint_attention_dim=512, pooled_projection_dim=256,
                                 guidance_embeds=True, axes_dims_rope=(16, 56, 56)).to(torch.bfloat16)
    net.save_pretrained(folder / "net")

    def inputs(name: str, rows: int, columns: int, text: int) -> pathlib.Path:
        ids = torch.zeros(rows, columns, 3)
        ids[..., 1], ids[..., 2] = torch.arange(rows)[:, None], torch.arange(columns)[None]
        save_file({"hidden_states": torch.randn(2, rows * columns, 64), "encoder_hidden_states": torch.randn(2, text, 512), "pooled_projections": torch.randn(2, 256),
                   "timestep": torch.tensor([0.9, 0.3]), "guidance": torch.full((2,), 3.5), "img_ids": ids.reshape(-1, 3), "txt_ids": torch.zeros(text, 3)}, folder / name)
        return folder / name

    return folder / "net", inputs("compared.safetensors", 12, 16, 64), inputs("calibration.safetensors", 12, 12, 48)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lacuna", default="build/release/lacuna", metavar="PROGRAM", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE", help="keep the rows as JSON")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        net, compared, calibration = make(folder, args.seed)
        norms = folder / "norms.safetensors"
        run(args.lacuna, "image", "calibrate", net, "--inputs", calibration, "-o", norms)
        for case, (policy, mask) in CASES.items():
            packed = folder / "packed.gguf"
            run(args.lacuna, "image", "compress", net, "--policy", policy, "--mask", mask, *(["--norms", norms] if mask == "wanda" else []), "-o", packed)
            for line in run(args.lacuna, "image", "errors", packed, "--against", net, "--inputs", compared, "--layers", "--json").splitlines():
                rows.append({"case": case, **json.loads(line)})
    for kind in ("block", "layer"):
        names = list(dict.fromkeys(row["name"] for row in rows if row["kind"] == kind))
        print(f"{kind:<60}" + "".join(f"{case:>16}" for case in CASES))
        for name in names:
            of = {row["case"]: row for row in rows if row["kind"] == kind and row["name"] == name}
            print(f"{name:<60}" + "".join(f"{of[case]['relative_error']:>16.4f}" if case in of else " " * 16 for case in CASES))
    if args.out:
        commit = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True).stdout.strip()
        args.out.write_text(json.dumps({"command": shlex.join(sys.argv), "commit": commit, "date": datetime.date.today().isoformat(), "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
