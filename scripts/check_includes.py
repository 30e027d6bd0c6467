#!/usr/bin/env python3
"""Checks the include arrows between the folders of src/ (docs/ARCHITECTURE.md): a folder may include only those listed for it, and itself."""
import pathlib
import re
import sys

ARROWS = {
    "core": [],
    "layout": ["core"],
    "io": ["core", "layout"],
    "tokenizer": ["core"],
    "kernels": ["core", "layout"],
    "solver": ["core", "layout"],
    "model": ["core", "layout", "io", "kernels"],
    "calibrate": ["core", "layout", "io", "kernels", "model", "tokenizer"],
    "eval": ["core", "layout", "io", "kernels", "model", "tokenizer"],
    "compress": ["core", "layout", "io", "kernels", "model", "tokenizer", "solver"],
    "cli": ["core", "layout", "io", "tokenizer", "kernels", "model", "calibrate", "eval", "solver", "compress"],
}
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"')


def main() -> int:
    root = pathlib.Path(__file__).resolve().parent.parent / "src"
    errors = 0
    count = 0
    for path in sorted(root.rglob("*")):
        if path.suffix not in {".h", ".cc", ".cu", ".cuh"}:
            continue
        folder = path.relative_to(root).parts[0]
        if folder not in ARROWS:
            print(f"error: src/{folder}: not a known folder; add its arrows to scripts/check_includes.py", file=sys.stderr)
            return 1
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            found = INCLUDE.match(line)
            if not found:
                continue
            count += 1
            target = found.group(1)
            where = f"{path.relative_to(root.parent)}:{number}"
            if target == "lacuna_commit.h" and folder == "cli":
                continue
            if not (root / target).is_file():
                print(f'error: {where}: "{target}" is not a path from src/', file=sys.stderr)
                errors += 1
            elif target.split("/")[0] not in [folder, *ARROWS[folder]]:
                print(f'error: {where}: {folder} must not include "{target}"', file=sys.stderr)
                errors += 1
    print(f"include arrows: {count} includes checked, {errors} wrong")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
