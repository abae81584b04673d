"""Runtimes of specs: what their scripts leave behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from forkyard.builds import runtimes
from forkyard.builds.steps import new_user

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
NAME = f"python{VERSION}"
#: Stands in for uv: what it installs looks for its library where a Python does, beside the directory that it was found in,
#: links to itself followed; and then is the Python that runs this test.
UV = f"""#!/bin/sh
target="$UV_PYTHON_INSTALL_DIR/cpython-new"
case "$1 $2" in
"python install")
  [ -z "$NONE" ] || exit 2
  mkdir -p "$target/bin" "$target/lib/python3.x"
  touch "$target/lib/python3.x/EXTERNALLY-MANAGED"
  cat > "$target/bin/{NAME}" <<'PYTHON'
#!/bin/sh
me=$0
while [ -L "$me" ]; do
  to=$(readlink "$me")
  case $to in /*) me=$to ;; *) me=${{me%/*}}/$to ;; esac
done
[ -d "${{me%/bin/*}}/lib/python3.x" ] || {{ echo "no library for $0" >&2; exit 9; }}
if [ "$1" = -m ]; then echo "$0 $*"; else exec {sys.executable} "$@"; fi
PYTHON
  chmod +x "$target/bin/{NAME}" ;;
"python find") echo "$target/bin/{NAME}" ;;
"pip install") echo "$*" > "$UV_PYTHON_INSTALL_DIR/installed" ;;
esac
"""


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def run(command: list[str], path: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env={"PATH": path, **env}, capture_output=True, text=True, timeout=60)


def test_another_python_is_the_one_by_all_its_names_and_so_is_its_pip(tmp_path: Path) -> None:
    opt, links = tmp_path / "opt", tmp_path / "links"
    program(links / "uv", UV)
    program(links / "python3", "#!/bin/sh\necho Python 3.1.0\n")
    opt.mkdir()
    of_base, of_image = f"{opt}/python/bin:{links}:/usr/bin:/bin", f"{links}:/usr/bin:/bin"
    script = runtimes.python(VERSION).replace("/opt/python", f"{opt}/python").replace("/usr/local/bin", str(links))
    done = run(["bash", "-c", script], of_base)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"Python {VERSION}.")
    made = opt / "pythons" / "cpython-new"
    for path in (of_base, of_image):
        for name in ("python", "python3", NAME):
            said = run([name, "-c", "print(1)"], path)
            assert said.stdout == "1\n", said.stderr
        for pip in ("pip", "pip3", f"pip{VERSION}"):
            assert run([pip, "list"], path).stdout == f"{made}/bin/python3 -m pip list\n"
    assert (opt / "python" / "bin").resolve() == made / "bin", "where programs that pip installs are found"
    assert not list(opt.rglob("EXTERNALLY-MANAGED"))
    assert "ipykernel" in (opt / "pythons" / "installed").read_text()
    again = run(["bash", "-c", script], of_base, NONE="1")
    assert (again.returncode, again.stdout) == (0, ""), "it is there"


def test_a_python_that_nobody_has_is_told_apart(tmp_path: Path) -> None:
    program(tmp_path / "uv", UV)
    script = runtimes.python("3.99").replace("/opt/python", str(tmp_path / "python"))
    assert run(["bash", "-c", script], f"{tmp_path}:/usr/bin:/bin", NONE="1").returncode == runtimes.NOT_TO_BE_HAD


@pytest.mark.parametrize(
    ("has", "asked"),
    [
        (("id", "useradd", "adduser"), ""),
        (("useradd", "adduser"), "useradd -m -s /bin/bash -- new"),
        (("adduser",), "adduser -D -s /bin/sh -- new"),
    ],
)
def test_a_user_is_made_by_whatever_the_machine_has(has: tuple[str, ...], asked: str, tmp_path: Path) -> None:
    for name in has:
        program(tmp_path / name, "#!/bin/sh\n" + ("" if name == "id" else f'echo "{name} $*"\n'))
    done = run(["/bin/sh", "-c", new_user("new")], str(tmp_path))
    assert (done.returncode, done.stdout.strip()) == (0, asked)


def test_where_nothing_can_make_a_user_it_is_told(tmp_path: Path) -> None:
    done = run(["/bin/sh", "-c", new_user("new")], str(tmp_path))
    assert done.returncode == 127
    assert "no user new, and neither useradd nor adduser" in done.stderr
