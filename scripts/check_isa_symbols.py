#!/usr/bin/env python3
"""usage: check_isa_symbols.py BUILD_FOLDER

Objects compiled for one instruction set may define only symbols of that set's namespace. A weak symbol of another name (an inline function of the
standard library, say) could be merged with other objects' copies by the linker, and the program would then run AVX-512 code on a CPU without it.
"""
import pathlib
import platform
import subprocess
import sys


def main() -> int:
    build = pathlib.Path(sys.argv[1])
    errors = 0
    objects = 0
    for isa in ("avx2", "avx512", "avx512vnni"):
        for path in sorted(build.rglob(f"lacuna_kernels_{isa}.dir/**/*.o")):
            objects += 1
            listing = subprocess.run(["nm", "-C", "--defined-only", str(path)], check=True, capture_output=True, text=True).stdout
            for line in listing.splitlines():
                kind, name = line.split(maxsplit=2)[1:3] if line[0] != " " else line.split(maxsplit=1)
                leaves = kind.isupper() and kind not in "N"
                if leaves and f"lacuna::cpu::{isa}::" not in name and not name.startswith("DW.ref."):
                    print(f"error: {path.name} for {isa} defines {name} ({kind}) outside lacuna::cpu::{isa}", file=sys.stderr)
                    errors += 1
    if objects == 0:
        if platform.machine() in ("x86_64", "AMD64"):
            print(f"error: {build} holds no instruction set objects: build lacuna there first", file=sys.stderr)
            return 1
        print("instruction set objects: none on this architecture")
        return 0
    print(f"instruction set objects: {objects} checked, {errors} symbols leave their namespace")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
