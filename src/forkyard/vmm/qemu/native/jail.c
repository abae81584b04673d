/* The launcher of a VM: gives up everything a hypervisor does not need, then becomes it.
 *
 *   jail --uid N --gid N [--cgroup FILE]... [--netns new|PATH] [--tap NAME=FD] [--rlimit NAME=N]... [--keep-fd N]...
 *        [--oom-score-adj N] [--setenv NAME=VALUE]... [--chdir DIR] -- PROGRAM ARGS...
 *
 * It is one program and not Python code between fork and exec, because the daemon has threads and a heap worth not
 * copying, and because these few lines are what stands between a broken-out guest and root.
 *
 * Order matters: what needs root comes first (cgroups, namespaces, raising limits), then the user is dropped, then the way
 * back is closed (no_new_privs). Any failure prints one line and ends with status 111: a VM never starts half confined.
 *
 * Not done yet: a file system of its own (pivot_root into an empty directory). The user owns no file but its disk, and
 * QEMU's seccomp filter denies exec and fork, but it can still read what is world-readable on the host.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MAX_LIST 16

__attribute__((noreturn, format(printf, 1, 2))) static void die(const char *format, ...) {
    int error = errno;
    va_list args;
    va_start(args, format);
    fputs("jail: ", stderr);
    vfprintf(stderr, format, args);
    va_end(args);
    if (error)
        fprintf(stderr, ": %s", strerror(error));
    fputc('\n', stderr);
    exit(111);
}

static unsigned long long number(const char *text, const char *what) {
    char *end;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (errno || !*text || *end || *text == '-') {
        errno = 0;
        die("%s is not a number: %s", what, text);
    }
    return value;
}

static void write_file(const char *path, const char *text, const char *what) {
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0 || write(fd, text, strlen(text)) < 0)
        die("cannot %s %s", what, path);
    close(fd);
}

static void limit(const char *setting) {
    static const struct {
        const char *name;
        int resource;
    } known[] = {{"core", RLIMIT_CORE}, {"fsize", RLIMIT_FSIZE}, {"nofile", RLIMIT_NOFILE}, {"nproc", RLIMIT_NPROC}};
    const char *value = strchr(setting, '=');
    for (size_t i = 0; value && i < sizeof known / sizeof *known; i++)
        if (strlen(known[i].name) == (size_t)(value - setting) && !strncmp(setting, known[i].name, value - setting)) {
            rlim_t n = number(value + 1, setting);
            struct rlimit both = {n, n};
            if (setrlimit(known[i].resource, &both))
                die("cannot set limit %s", setting);
            return;
        }
    errno = 0;
    die("unknown limit: %s", setting);
}

static void enter_netns(const char *where) {
    if (!strcmp(where, "new")) {
        if (unshare(CLONE_NEWNET))
            die("cannot make a network namespace");
        return;
    }
    int fd = open(where, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || setns(fd, CLONE_NEWNET))
        die("cannot enter network namespace %s", where);
    close(fd);
}

/* Opened here, in the namespace just entered and while we may: the hypervisor gets a cable, not the right to lay one. A tap
 * that is not there yet is made, and ends with the process. */
static int open_tap(const char *setting, const int *taken, int count) {
    const char *value = strchr(setting, '=');
    struct ifreq request = {.ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR};
    if (!value || value == setting || value - setting >= IFNAMSIZ)
        die("not NAME=FD: %s", setting);
    memcpy(request.ifr_name, setting, value - setting);
    int wanted = number(value + 1, "--tap"), fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0)
        die("cannot open /dev/net/tun");
    errno = 0;
    for (int i = 0; i < count; i++)
        if (taken[i] == wanted)
            die("descriptor %d is passed twice", wanted);
    if (ioctl(fd, TUNSETIFF, &request))
        die("cannot attach to the tap %s", request.ifr_name);
    if (dup2(fd, wanted) < 0) /* without close-on-exec */
        die("cannot pass the tap as %d", wanted);
    close(fd);
    return wanted;
}

static int ascending(const void *a, const void *b) {
    return *(const int *)a - *(const int *)b;
}

static void close_all_but(int *keep, int count) {
    unsigned int from = 3;
    qsort(keep, count, sizeof *keep, ascending);
    for (int i = 0; i < count; i++) {
        if ((unsigned)keep[i] > from && syscall(SYS_close_range, from, (unsigned)keep[i] - 1, 0))
            die("cannot close inherited files");
        from = (unsigned)keep[i] + 1;
    }
    if (syscall(SYS_close_range, from, ~0U, 0))
        die("cannot close inherited files");
}

int main(int argc, char **argv) {
    const char *cgroups[MAX_LIST], *netns = NULL, *tap = NULL, *directory = "/", *oom = NULL;
    int keep[MAX_LIST + 1], cgroup_count = 0, keep_count = 0, at = 1;
    uid_t uid = 0;
    gid_t gid = 0;

    clearenv();
    for (; at < argc && strcmp(argv[at], "--"); at += 2) {
        const char *option = argv[at], *value = at + 1 < argc ? argv[at + 1] : NULL;
        errno = 0;
        if (!value)
            die("%s needs a value", option);
        if (!strcmp(option, "--uid"))
            uid = number(value, "--uid");
        else if (!strcmp(option, "--gid"))
            gid = number(value, "--gid");
        else if (!strcmp(option, "--cgroup") && cgroup_count < MAX_LIST)
            cgroups[cgroup_count++] = value;
        else if (!strcmp(option, "--netns"))
            netns = value;
        else if (!strcmp(option, "--tap"))
            tap = value;
        else if (!strcmp(option, "--rlimit"))
            limit(value);
        else if (!strcmp(option, "--keep-fd") && keep_count < MAX_LIST)
            keep[keep_count++] = number(value, "--keep-fd");
        else if (!strcmp(option, "--oom-score-adj"))
            oom = value;
        else if (!strcmp(option, "--setenv") && strchr(value, '='))
            putenv((char *)value);
        else if (!strcmp(option, "--chdir"))
            directory = value;
        else
            die("unknown or repeated option %s %s", option, value);
    }
    errno = 0;
    if (at + 1 >= argc)
        die("no program given");
    if (uid == 0 || gid == 0)
        die("refusing to run a VM as root: give --uid and --gid");
    at++;

    /* "0" is the caller: moving only oneself takes no lock that spans all cgroups (8-15 ms saved under cgroup v1). */
    for (int i = 0; i < cgroup_count; i++)
        write_file(cgroups[i], "0", "join cgroup");
    if (oom)
        write_file("/proc/self/oom_score_adj", oom, "set");
    if (netns)
        enter_netns(netns);
    if (tap) {
        int fd = open_tap(tap, keep, keep_count);
        keep[keep_count++] = fd;
    }
    if (unshare(CLONE_NEWIPC | CLONE_NEWUTS))
        die("cannot make IPC and UTS namespaces");
    if (setsid() < 0 && errno != EPERM) /* EPERM: a session leader already */
        die("cannot start a session");
    umask(077);
    close_all_but(keep, keep_count);

    if (setgroups(0, NULL))
        die("cannot drop groups");
    if (setresgid(gid, gid, gid))
        die("cannot become group %u", gid);
    if (setresuid(uid, uid, uid))
        die("cannot become user %u", uid);
    /* As the user, not as root: a directory the VM may not enter must fail here, with its name. */
    if (chdir(directory))
        die("user %u cannot enter %s (every directory above it needs mode o+x)", uid, directory);
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        die("cannot set no_new_privs");

    execv(argv[at], argv + at);
    die("cannot run %s", argv[at]);
}
