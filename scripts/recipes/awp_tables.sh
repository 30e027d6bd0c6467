#!/usr/bin/env bash
# Tables 1 to 5 of the AWP paper on its own models, the paper's values beside ours: scripts/recipes/awp_tables.sh --help
set -euo pipefail
exec python3 "$(dirname "$0")/awp_tables.py" "$@"
