/* The first process of a machine whose image is not ours, and may have nothing in it.
 *
 *   init           as process 1: loads drivers, mounts what programs expect, starts the agent, and buries the dead. If the
 *                  image has systemd, that takes over as soon as the drivers are there.
 *   init agent     becomes the agent
 *   init poweroff  asks process 1 to shut the machine down
 *
 * The image knows it as /sbin/init. The interpreter and the drivers were put below /opt/forkyard when it was imported.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define HOME "/opt/forkyard"
#define PORT "/dev/virtio-ports/forkyard.agent"
#define RUNTIME HOME "/runtime"

static void say(const char *what, const char *about) {
    char line[512];
    int size = snprintf(line, sizeof line, "forkyard: %s%s\n", what, about);
    int fd = open("/dev/console", O_WRONLY | O_NOCTTY | O_NONBLOCK | O_CLOEXEC);
    if (fd >= 0) {
        if (write(fd, line, size < (int)sizeof line ? size : (int)sizeof line - 1) < 0) { /* nobody listens */
        }
        close(fd);
    }
}

static void pause_ms(int ms) {
    struct timespec time = {ms / 1000, ms % 1000 * 1000000L};
    nanosleep(&time, NULL);
}

static void put(const char *path, const char *text) {
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd >= 0) {
        if (write(fd, text, strlen(text)) < 0) { /* then not */
        }
        close(fd);
    }
}

static void mounted(const char *type, const char *where, unsigned long flags, const char *options) {
    mkdir(where, 0755);
    if (mount(type, where, type, flags, options) && errno != EBUSY)
        say("cannot mount ", where);
}

static void load_drivers(void) {
    char name[256], path[512];
    FILE *order = fopen(HOME "/modules/order", "re");
    if (!order)
        return;
    while (fgets(name, sizeof name, order)) {
        name[strcspn(name, "\n")] = 0;
        snprintf(path, sizeof path, HOME "/modules/%s", name);
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd < 0 || (syscall(SYS_finit_module, fd, "", 0) && errno != EEXIST))
            say("cannot load ", name);
        if (fd >= 0)
            close(fd);
    }
    fclose(order);
}

/* What udev would do. */
static int find_port(void) {
    char path[512], name[64], target[300];
    DIR *ports = opendir("/sys/class/virtio-ports");
    struct dirent *entry;
    int found = 0;
    if (!ports)
        return 0;
    while (!found && (entry = readdir(ports))) {
        snprintf(path, sizeof path, "/sys/class/virtio-ports/%s/name", entry->d_name);
        FILE *file = fopen(path, "re");
        if (!file)
            continue;
        if (fgets(name, sizeof name, file) && !strncmp(name, "forkyard.agent", 14)) {
            mkdir("/dev/virtio-ports", 0755);
            snprintf(target, sizeof target, "../%s", entry->d_name);
            found = !symlink(target, PORT) || errno == EEXIST;
        }
        fclose(file);
    }
    closedir(ports);
    return found;
}

static void become_agent(void) {
    char *argv[] = {HOME "/agent/front", PORT, RUNTIME "/lib/ld-linux-x86-64.so.2", "--library-path", RUNTIME "/lib",
                    RUNTIME "/bin/python3.11", "-I", "-X", "utf8", HOME "/agent", "--machine", "own", NULL};
    char *env[] = {"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8", NULL};
    mount(NULL, "/sys/fs/cgroup", NULL, MS_REMOUNT, "favordynmods");
    put("/proc/self/oom_score_adj", "-900");
    setpriority(PRIO_PROCESS, 0, -10);
    execve(argv[0], argv, env);
    say("cannot start the agent: ", strerror(errno));
    _exit(127);
}

static pid_t start_agent(void) {
    pid_t pid = fork();
    if (pid)
        return pid;
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    setsid();
    int fd = open("/dev/console", O_RDWR | O_NOCTTY);
    if (fd < 0)
        fd = open("/dev/null", O_RDWR);
    dup2(fd, 0), dup2(fd, 1), dup2(fd, 2);
    if (fd > 2)
        close(fd);
    become_agent();
    return 0;
}

static void shut_down(void) {
    say("shutting down", "");
    kill(-1, SIGTERM);
    for (int tries = 0; tries < 40; tries++) {
        while (waitpid(-1, NULL, WNOHANG) > 0)
            ;
        if (waitpid(-1, NULL, WNOHANG) < 0 && errno == ECHILD)
            break;
        pause_ms(50);
    }
    kill(-1, SIGKILL);
    sync();
    mount(NULL, "/", NULL, MS_REMOUNT | MS_RDONLY, NULL);
    sync();
    reboot(RB_POWER_OFF);
}

static void serve(void) {
    sigset_t all;
    sigfillset(&all);
    sigprocmask(SIG_BLOCK, &all, NULL);
    reboot(RB_DISABLE_CAD);
    pid_t agent = start_agent();
    struct timespec while_ = {1, 0};
    for (;;) {
        int signal = sigtimedwait(&all, NULL, &while_);
        if (signal == SIGTERM || signal == SIGINT || signal == SIGUSR1 || signal == SIGUSR2 || signal == SIGPWR)
            shut_down();
        pid_t dead;
        while ((dead = waitpid(-1, NULL, WNOHANG)) > 0)
            if (dead == agent) {
                pause_ms(100);
                agent = start_agent();
            }
    }
}

int main(int argc, char **argv) {
    char system[512] = "";
    if (argc > 1 && !strcmp(argv[1], "agent"))
        become_agent();
    if (getpid() != 1)
        return argc > 1 && !strcmp(argv[1], "poweroff") ? kill(1, SIGUSR2) : 1;
    mounted("proc", "/proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
    mounted("sysfs", "/sys", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
    mounted("devtmpfs", "/dev", MS_NOSUID, "mode=0755");
    load_drivers();
    for (int tries = 0; !find_port() && tries < 600; tries++)
        pause_ms(50);
    int fd = open(HOME "/system", O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
        ssize_t size = read(fd, system, sizeof system - 1);
        close(fd);
        if (size > 0) {
            system[strcspn(system, "\n")] = 0;
            char *init[] = {system, NULL};
            execv(system, init);
            say("cannot start ", system);
        }
    }
    mounted("devpts", "/dev/pts", MS_NOSUID | MS_NOEXEC, "mode=0620,gid=5,ptmxmode=0666");
    mounted("tmpfs", "/dev/shm", MS_NOSUID | MS_NODEV, "mode=1777");
    mounted("tmpfs", "/run", MS_NOSUID | MS_NODEV, "mode=0755");
    mounted("cgroup2", "/sys/fs/cgroup", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
    if (symlink("/proc/self/fd", "/dev/fd") || symlink("fd/0", "/dev/stdin") || symlink("fd/1", "/dev/stdout") ||
        symlink("fd/2", "/dev/stderr")) { /* they are there */
    }
    say("milestone init", "");
    serve();
}
