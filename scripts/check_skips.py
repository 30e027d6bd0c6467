#!/usr/bin/env python3
"""usage: check_skips.py CTEST_LOG ALLOWED: fails when a test skipped whose name no line of ALLOWED matches (shell patterns, # comments)."""
import fnmatch
import pathlib
import re
import sys


def main() -> int:
    log, allowed = (pathlib.Path(p).read_text(encoding="utf-8", errors="replace") for p in sys.argv[1:3])
    patterns = [line.split("#")[0].strip() for line in allowed.splitlines()]
    patterns = [p for p in patterns if p]
    skipped = sorted(set(re.findall(r"Test +#\d+: (\S+) \.*\*\*\*Skipped", log)))
    unexpected = [name for name in skipped if not any(fnmatch.fnmatchcase(name, p) for p in patterns)]
    if skipped:
        print(f"{len(skipped)} tests SKIPPED: {', '.join(skipped)}")
    for name in unexpected:
        print(f"error: {name} skipped, but tests/allowed_skips.txt does not list it", file=sys.stderr)
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
