#!/usr/bin/env python3
"""Figures of ggml's own quantizer for tests/layout/ggml_quantizer_test.cc.

    scripts/ggml_quantizer_errors.py PATH/libggml-base.so MODEL_FOLDER tests/fixtures/ggml_quantizer

Writes rows.bf16 (Gaussian, heavy-tailed and trained rows, and an importance) and errors.json: for every layout and set
of rows the sum of importance * (weight - decoded)^2 that ggml_quantize_chunk leaves, in double precision. MODEL_FOLDER
is a Hugging Face folder in bf16 whose rows are multiples of 256; needs numpy and the `gguf` package (its decoders).
"""
import ctypes
import json
import pathlib
import struct
import sys

import gguf
import numpy as np

LAYOUTS = ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_K", "q3_K", "q4_K", "q5_K", "q6_K"]


def to_bf16(values):
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def trained_rows(folder, count, rng):
    """`count` random rows of 512 weights of the folder's linear layers."""
    rows = []
    for path in sorted(pathlib.Path(folder).glob("*.safetensors")):
        data = path.read_bytes()
        length = struct.unpack("<Q", data[:8])[0]
        for name, entry in json.loads(data[8 : 8 + length]).items():
            if "_proj" not in name or entry["dtype"] != "BF16" or entry["shape"][1] != 512:
                continue
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            rows.append(np.frombuffer(data[begin:end], np.uint16).reshape(entry["shape"]))
    rows = np.concatenate(rows)
    return rows[rng.choice(len(rows), count, replace=False)]


class GgmlInitParams(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


def main(library, model, out):
    ggml = ctypes.CDLL(library)
    ggml.ggml_init.argtypes, ggml.ggml_init.restype = [GgmlInitParams], ctypes.c_void_p
    ggml.ggml_init(GgmlInitParams(1024, None, True))  # fills ggml's f16 tables
    ggml.ggml_quantize_chunk.restype = ctypes.c_size_t
    ggml.ggml_version.restype = ctypes.c_char_p
    rng = np.random.default_rng(11)
    sets = {
        "gaussian": to_bf16(0.02 * rng.standard_normal((8, 1024))),
        "heavy": to_bf16(0.02 * rng.standard_t(3, (8, 1024))),
        "trained": trained_rows(model, 16, rng),
    }
    importance_bits = to_bf16(np.exp(1.5 * rng.standard_normal(1024)))
    out = pathlib.Path(out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "rows.bf16").write_bytes(b"".join(s.tobytes() for s in [*sets.values(), importance_bits]))
    errors = {}
    for layout in LAYOUTS:
        kind = gguf.GGMLQuantizationType[layout.upper()]
        cols, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        for name, bits in sets.items():
            rows, K = from_bf16(bits), bits.shape[1]
            for weighted in [False, True]:
                importance = from_bf16(importance_bits[:K]) if weighted else None
                codes = np.zeros((len(rows), K // cols * block_bytes), np.uint8)
                ggml.ggml_quantize_chunk(
                    ctypes.c_int(kind.value), rows.ctypes.data_as(ctypes.c_void_p),
                    codes.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(0), ctypes.c_int64(len(rows)),
                    ctypes.c_int64(K), importance.ctypes.data_as(ctypes.c_void_p) if weighted else None)
                decoded = gguf.quants.dequantize(codes, kind).astype(np.float64)
                squares = (rows.astype(np.float64) - decoded) ** 2 * (importance if weighted else 1.0)
                errors.setdefault(layout, {})[name + ("_importance" if weighted else "")] = float(squares.sum())
    result = {"ggml": ggml.ggml_version().decode(), "errors": errors,
              "sets": [{"name": name, "shape": list(bits.shape)} for name, bits in sets.items()]}
    (out / "errors.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
