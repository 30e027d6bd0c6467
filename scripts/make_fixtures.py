#!/usr/bin/env python3
"""Makes the third-party ground truth under tests/fixtures: run it with the packages listed in tests/fixtures/README.md.

    scripts/make_fixtures.py [SUBJECT ...] [--shared-data FOLDER]

Subjects: hf ggml_types gguf_files gguf_models tokenizer chat text_model quantized (default: all of these), pruned, which needs
compressed-tensors 0.12.2, and zero_shot, which needs lm_eval 0.4.13. The output is deterministic for the same package versions.
"""

import argparse
import importlib
import inspect
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIXTURES = ROOT / "tests" / "fixtures"
SUBJECTS = ["hf", "ggml_types", "gguf_files", "gguf_models", "tokenizer", "chat", "text_model", "quantized"]
OTHERS = ["pruned", "zero_shot"]  # made with an older package, with one more


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subjects", nargs="*", metavar="SUBJECT", help="what to make: " + " ".join(SUBJECTS + OTHERS))
    parser.add_argument("--shared-data", type=Path, default=ROOT.parent / "shared" / "data",
                        help="folder with tokenizer/ and models/docs22m, for the reference ids of the big vocabularies")
    arguments = parser.parse_args()
    unknown = set(arguments.subjects) - set(SUBJECTS + OTHERS)
    if unknown:
        parser.error(f"unknown subject {', '.join(sorted(unknown))}; known: {', '.join(SUBJECTS + OTHERS)}")
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(FIXTURES))
    for subject in arguments.subjects or SUBJECTS:
        make = importlib.import_module(f"generate.{subject}").make
        if "shared_data" in inspect.signature(make).parameters:
            make(FIXTURES, shared_data=arguments.shared_data)
        else:
            make(FIXTURES)


if __name__ == "__main__":
    main()
