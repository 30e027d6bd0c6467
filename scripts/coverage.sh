#!/usr/bin/env bash
# Line and branch coverage of src/io, src/tokenizer, src/layout by the tests of these folders alone (nothing else is built: io_test, tokenizer_test, layout_test):
# a table, and docs/results/coverage.json where --save is given. What the tests of models and of the command line reach besides is not counted.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/lib/packages.sh
case ${1:-} in
  "" | --save) ;;
  *) printf 'usage: scripts/coverage.sh [--save]\n' >&2; exit 2 ;;
esac
install_packages "${build_packages[@]}" gcovr
scripts/build.sh --no-install --preset coverage io_test tokenizer_test layout_test
find build/coverage -name '*.gcda' -delete
scripts/run_ctest.sh build/coverage --exclude-regex NOT_BUILT
# Branches that only an exception takes are left out: nearly every call has one.
gcovr --root . --object-directory build/coverage --filter 'src/(io|tokenizer|layout)/' --exclude-throw-branches --json-summary build/coverage/summary.json --txt
[ "${1:-}" = --save ] || exit 0
python3 - <<'PY'
import collections, datetime, json, subprocess
summary = json.load(open("build/coverage/summary.json"))
folders = collections.defaultdict(collections.Counter)
for entry in summary["files"]:
    folder = folders["/".join(entry["filename"].split("/")[:2])]
    for what in ("line", "branch"):
        folder[what, "all"] += entry[f"{what}_total"]
        folder[what, "covered"] += entry[f"{what}_covered"]
rows = []
for folder, count in sorted(folders.items()):
    row = {"folder": folder}
    for what, many in (("line", "lines"), ("branch", "branches")):
        row |= {many: count[what, "all"], f"{many}_covered": count[what, "covered"],
                f"{many}_percent": round(100 * count[what, "covered"] / count[what, "all"], 1)}
    rows.append(row)
commit = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
with open("docs/results/coverage.json", "w") as out:
    json.dump({"command": "scripts/coverage.sh --save", "commit": commit, "date": datetime.date.today().isoformat(), "rows": rows}, out, indent=1)
    out.write("\n")
PY
