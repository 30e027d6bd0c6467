#!/usr/bin/env bash
# Line coverage of src/io, src/tokenizer, src/layout by the unit tests: a table, and docs/results/coverage.json where --save is given.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/lib/packages.sh
case ${1:-} in
  "" | --save) ;;
  *) printf 'usage: scripts/coverage.sh [--save]\n' >&2; exit 2 ;;
esac
install_packages "${build_packages[@]}" gcovr
scripts/build.sh --no-install --preset coverage
find build/coverage -name '*.gcda' -delete
scripts/run_ctest.sh build/coverage
report=(gcovr --root . --object-directory build/coverage --filter 'src/(io|tokenizer|layout)/' --exclude-throw-branches)
"${report[@]}"
if [ "${1:-}" = --save ]; then
  "${report[@]}" --json-summary build/coverage/summary.json
  python3 - <<'PY'
import datetime, json, subprocess
summary = json.load(open("build/coverage/summary.json"))
folders = {}
for entry in summary["files"]:
    folder = "/".join(entry["filename"].split("/")[:2])
    total, covered = folders.get(folder, (0, 0))
    folders[folder] = (total + entry["line_total"], covered + entry["line_covered"])
commit = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
rows = [{"folder": f, "lines": t, "covered": c, "percent": round(100 * c / t, 1)} for f, (t, c) in sorted(folders.items())]
with open("docs/results/coverage.json", "w") as out:
    json.dump({"command": "scripts/coverage.sh --save", "commit": commit, "date": datetime.date.today().isoformat(), "rows": rows}, out, indent=1)
    out.write("\n")
PY
fi
