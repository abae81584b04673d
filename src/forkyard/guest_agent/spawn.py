"""Starting a process: fork, set everything up in the child, exec. Owns what happens up to the exec, and nothing after.

The outcome of the exec itself arrives on a pipe: closed without a byte when the program runs, else why it does not.
"""

from __future__ import annotations

import fcntl
import os
import signal
import termios

from .failures import Failure, from_os_error

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .accounts import Account
    from .cgroups import Cgroup

_NULL = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)


_PLAIN = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./:,@+ "
#: Words with a meaning of their own at the beginning of a command. (`true` and `false` are programs as well.)
_WORDS = (
    ". : alias bg bind break builtin caller case cd command compgen complete compopt continue coproc declare dirs disown do "
    "done echo elif else enable esac eval exec exit export fc fg fi for function getopts hash help history if in jobs kill "
    "let local logout mapfile popd printf pushd pwd read readarray readonly return select set shift shopt source suspend "
    "test then time times trap type typeset ulimit umask unalias unset until wait while"
)
_SHELL_WORDS = frozenset(_WORDS.split())


class Started:
    __slots__ = ("pid", "pidfd", "report")

    def __init__(self, pid: int, pidfd: int, report: int) -> None:
        self.pid = pid
        self.pidfd = pidfd
        self.report = report  # pipe: empty at its end if the program runs, else what `explain` understands


def spawn(
    argv: list[str],
    *,
    env: dict[str, str],
    cwd: str,
    account: Account,
    stdin: int | None,
    stdout: int,
    stderr: int,
    cgroup: Cgroup | None = None,
    terminal: bool = False,
    plain: list[str] | None = None,
) -> Started:
    """Fork. The given descriptors become 0, 1, 2 of the child (stdin None: /dev/null) and stay open here. `plain` is what
    the shell command `argv` comes to (see `plain_words`); if it cannot be started, the shell says why."""
    report, child_report = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        pid = os.fork()
    except OSError as error:
        os.close(report)
        os.close(child_report)
        raise from_os_error(error, "cannot start another process") from None
    if pid == 0:
        stage = ""
        try:
            _become(account, cgroup, stdin, stdout, stderr, terminal)
            stage = f"working directory {cwd}"
            os.chdir(cwd)
            if plain is not None:
                _exec_plain(plain, env)
            stage = f"program {argv[0]}"
            _exec(argv, env)
        except BaseException as error:
            # Only what comes after the set-up can be the caller's mistake.
            number = error.errno if stage and isinstance(error, OSError) else 0
            reason = error.strerror if isinstance(error, OSError) else error
            message = f"{number} {stage or 'setting up the process'}: {reason}"
            os.write(child_report, message.encode("utf-8", "backslashreplace")[:1024])
        finally:
            os._exit(127)
    os.close(child_report)
    return Started(pid, os.pidfd_open(pid), report)


def _become(
    account: Account, cgroup: Cgroup | None, stdin: int | None, stdout: int, stderr: int, terminal: bool
) -> None:
    if cgroup is not None:
        _put(cgroup.procs, b"0")
    try:
        # The agent is protected from the out-of-memory killer and favoured by the scheduler; what it starts is not.
        _put("/proc/self/oom_score_adj", b"0")
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    except OSError:
        pass
    os.setsid()
    if terminal:
        fcntl.ioctl(stdout, termios.TIOCSCTTY, 0)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # Python ignores them, and ignoring is inherited
    # None of the three is below 3: the agent has its own 0, 1, 2 open.
    os.dup2(_NULL if stdin is None else stdin, 0)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.umask(0o022)
    if account.uid != 0 or os.getuid() != 0:
        os.setgroups(account.groups)
        os.setgid(account.gid)
        os.setuid(account.uid)


def _put(path: str, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY)
    os.write(fd, data)
    os.close(fd)


def _exec(argv: list[str], env: dict[str, str]) -> None:
    program = argv[0]
    if "/" in program:
        os.execve(program, argv, env)
    denied: OSError | None = None
    for directory in env.get("PATH", "").split(":"):
        candidate = f"{directory or '.'}/{program}"
        if not os.access(candidate, os.F_OK):
            continue
        try:
            os.execve(candidate, argv, env)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except PermissionError as error:
            denied = error
    raise denied or FileNotFoundError(2, "not found in PATH")


def plain_words(command: str, env: dict[str, str]) -> list[str] | None:
    """The words of a shell command that is nothing but a program and its arguments: starting the shell, which would only
    start the program in its own place, takes longer than most programs do. None if only the shell knows what it means."""
    if command.strip(_PLAIN):
        return None
    words = command.split(" ")
    if (
        words[0] in _SHELL_WORDS
        or "" in words
        or "BASH_ENV" in env
        or any(name.startswith("BASH_FUNC_") for name in env)
    ):
        return None
    return words


def _exec_plain(words: list[str], env: dict[str, str]) -> None:
    """Returns if the program is not there, or not one the kernel can start."""
    try:
        # What the shell adds.
        _exec(words, {**env, "PWD": os.getcwd(), "SHLVL": "0"})
    except OSError:
        pass


def explain(report: bytes) -> Failure:
    """What a child wrote instead of running the program."""
    number, _, message = report.decode("utf-8", "replace").partition(" ")
    error = int(number) if number.isdigit() else 0
    if error in (2, 20):  # ENOENT, ENOTDIR
        return Failure("command_not_found", message)
    if error == 8:  # ENOEXEC
        return Failure("command_not_found", f"{message} (a script needs a first line such as #!/bin/sh)")
    failure = from_os_error(OSError(error, ""), message)
    return Failure("guest_failure" if failure.code == "invalid_path" else failure.code, message)
