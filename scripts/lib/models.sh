# Sourced by scripts that need real models: the folder where `lacuna pull` stores them.

models_dir="${LACUNA_MODELS:-$HOME/.cache/lacuna/models}"
