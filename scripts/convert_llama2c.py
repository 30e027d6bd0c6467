#!/usr/bin/env python3
"""Turns a llama2.c model (version 0 .bin) and its SentencePiece tokenizer.model into a Hugging Face folder.

    convert_llama2c.py model.bin tokenizer.model OUT_FOLDER

The folder gets config.json, model.safetensors (float32) and tokenizer.model. Needs only Python's standard library.

The .bin: seven little-endian int32 (dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, seq_len; a negative vocab_size
says that the output head is a matrix of its own), then float32: token embedding, attention norms, wq, wk, wv, wo, ffn norms, w1, w2,
w3 (each for all layers in turn), final norm, two tables of rotary angles (not needed), output head if it is separate.
Rotary pairs are neighbours (2i, 2i+1) there and (i, i + d/2) in a Hugging Face folder, so rows of wq and wk are reordered.
"""
import argparse
import json
import pathlib
import shutil
import struct
import sys

HEADER = struct.Struct("<7i")


def fail(message):
    sys.exit(f"convert_llama2c.py: {message}")


def halves_order(heads, head_dim):
    """Row of the output -> row of the input."""
    return [h * head_dim + 2 * i + part for h in range(heads) for part in (0, 1) for i in range(head_dim // 2)]


def read_model(path):
    """-> (config, {name: (shape, bytes)})"""
    data = path.read_bytes()
    if len(data) < HEADER.size:
        fail(f"{path} has {len(data)} bytes, less than the header")
    dim, hidden, layers, heads, kv_heads, vocab, seq_len = HEADER.unpack_from(data)
    tied, vocab = vocab > 0, abs(vocab)
    if min(dim, hidden, layers, heads, kv_heads, vocab, seq_len) <= 0 or dim % heads or heads % kv_heads or dim // heads % 2:
        fail(f"{path} does not begin with the header of a version 0 model: {HEADER.unpack_from(data)}")
    head_dim = dim // heads
    kv_dim = kv_heads * head_dim
    offset = HEADER.size
    tensors = {}

    def take(rows, columns):
        nonlocal offset
        size = 4 * rows * columns
        if offset + size > len(data):
            fail(f"{path} ends early: {len(data)} bytes, at least {offset + size} expected")
        offset += size
        return data[offset - size:offset]

    def put(name, rows, columns, order=None):
        raw = take(rows, columns)
        if order:
            row = 4 * columns
            raw = b"".join(raw[r * row:(r + 1) * row] for r in order)
        tensors[name] = ([rows, columns] if rows > 1 else [columns], raw)

    def put_layers(name, rows, columns, order=None):
        for layer in range(layers):
            put(f"model.layers.{layer}.{name}.weight", rows, columns, order)

    put("model.embed_tokens.weight", vocab, dim)
    put_layers("input_layernorm", 1, dim)
    put_layers("self_attn.q_proj", dim, dim, halves_order(heads, head_dim))
    put_layers("self_attn.k_proj", kv_dim, dim, halves_order(kv_heads, head_dim))
    put_layers("self_attn.v_proj", kv_dim, dim)
    put_layers("self_attn.o_proj", dim, dim)
    put_layers("post_attention_layernorm", 1, dim)
    put_layers("mlp.gate_proj", hidden, dim)
    put_layers("mlp.down_proj", dim, hidden)
    put_layers("mlp.up_proj", hidden, dim)
    put("model.norm.weight", 1, dim)
    take(seq_len, head_dim)  # the cosines and sines: head_dim / 2 each
    if not tied:
        put("lm_head.weight", vocab, dim)
    if offset != len(data):
        fail(f"{path} has {len(data)} bytes, {offset} expected")
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": dim, "intermediate_size": hidden,
              "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab,
              "max_position_embeddings": seq_len, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
              "tie_word_embeddings": tied, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32"}
    return config, tensors


def write_safetensors(path, tensors):
    header, offset = {}, 0
    for name, (shape, raw) in tensors.items():
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset + len(raw)]}
        offset += len(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for _, raw in tensors.values():
            out.write(raw)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("tokenizer", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    args = parser.parse_args()
    config, tensors = read_model(args.model)
    args.out.mkdir(parents=True, exist_ok=True)
    write_safetensors(args.out / "model.safetensors", tensors)
    (args.out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    shutil.copyfile(args.tokenizer, args.out / "tokenizer.model")


if __name__ == "__main__":
    main()
