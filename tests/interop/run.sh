#!/bin/sh
# Makes an environment outside the repository, installs the reference packages, compares.
# Usage: sh tests/interop/run.sh [ENVIRONMENT]
set -eu
here=$(cd "$(dirname "$0")" && pwd)
environment=${1:-${TMPDIR:-/tmp}/dspark_interop}
[ -d "$environment" ] || python3 -m venv "$environment"
"$environment/bin/pip" install -q -r "$here/requirements.txt" -e "$here/../.."
exec "$environment/bin/python" "$here/compare.py"
