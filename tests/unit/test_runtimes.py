"""Runtimes of specs: what their scripts leave behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from forkyard.builds import runtimes

#: Stands in for uv: the Python it installs is a link to the one that runs this test.
UV = """#!/bin/sh
target="$UV_PYTHON_INSTALL_DIR/cpython-new"
case "$1 $2" in
"python install") [ -z "$NONE" ] || exit 2
  mkdir -p "$target/bin" "$target/lib/python3.x"; touch "$target/lib/python3.x/EXTERNALLY-MANAGED"
  printf '#!/bin/sh\\nif [ "$1" = -m ]; then echo "$0 $*"; else exec {python} "$@"; fi\\n' > "$target/bin/{name}"
  chmod +x "$target/bin/{name}" ;;
"python find") echo "$target/bin/{name}" ;;
"pip install") echo "$*" > "$UV_PYTHON_INSTALL_DIR/installed" ;;
esac
"""


def test_another_python_is_the_one_by_all_its_names_and_so_is_its_pip(tmp_path: Path) -> None:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    name = f"python{version}"
    links, pythons = tmp_path / "links", tmp_path / "pythons"
    links.mkdir()
    (links / "uv").write_text(UV.replace("{python}", sys.executable).replace("{name}", name))
    (links / "uv").chmod(0o755)
    (links / "python3").write_text("#!/bin/sh\necho Python 3.1.0\n")
    (links / "python3").chmod(0o755)
    script = runtimes.python(version).replace("/opt/python", str(pythons)).replace("/usr/local/bin", str(links))
    env = {"PATH": f"{links}:/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"Python {version}.")
    made = pythons / "versions" / "cpython-new" / "bin"
    for link in ("python", "python3", name):
        assert (links / link).resolve() == (made / name).resolve()
    for pip in ("pip", "pip3", name.replace("python", "pip")):
        said = subprocess.run([pip, "list"], env=env, capture_output=True, text=True, check=True).stdout
        assert said == f"{made}/python3 -m pip list\n"
    assert (pythons / "bin").resolve() == made.resolve(), "where programs that pip installs are found"
    assert not list(pythons.rglob("EXTERNALLY-MANAGED"))
    assert "ipykernel" in (pythons / "versions" / "installed").read_text()
    # Once more: it is there.
    again = subprocess.run(["bash", "-c", script], env={**env, "NONE": "1"}, capture_output=True, text=True)
    assert (again.returncode, again.stdout) == (0, "")


def test_a_python_that_nobody_has_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "uv").write_text(UV)
    (tmp_path / "uv").chmod(0o755)
    script = runtimes.python("3.99").replace("/opt/python", str(tmp_path))
    done = subprocess.run(["bash", "-c", script], env={"PATH": f"{tmp_path}:/usr/bin:/bin", "NONE": "1"})
    assert done.returncode == runtimes.NOT_TO_BE_HAD
