#!/bin/sh
# Finds a Python 3.11 and hands over to setup_env.py. Uses nothing but POSIX sh, as nothing is installed yet.
# PYTHON=/path/to/python3.11 overrides the search.
set -eu
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)

usable() {
    "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' >/dev/null 2>&1
}

if [ -n "${PYTHON:-}" ]; then
    if ! usable "$PYTHON"; then
        echo "setup: PYTHON=$PYTHON is not a working Python 3.11; set PYTHON to one." >&2
        exit 1
    fi
    exec "$PYTHON" "$here/setup_env.py" "$@"
fi
for candidate in python3.11 python3 python /usr/bin/python3.11 /usr/local/bin/python3.11; do
    if usable "$candidate"; then
        exec "$candidate" "$here/setup_env.py" "$@"
    fi
done
echo "setup: no Python 3.11 found (tried python3.11, python3, python). Install it with its venv module" >&2
echo "       (Debian: apt-get install python3.11 python3.11-venv) or set PYTHON=/path/to/python3.11." >&2
exit 1
