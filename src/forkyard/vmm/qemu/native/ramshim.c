/* Preloaded into QEMU: changes how it opens two files, and gives the daemon a hand inside its address space.
 *
 * A sandbox maps its template's RAM copy-on-write. QEMU 7.2 opens the file of a private memory backend for writing all the
 * same, so every VM's user would need write permission on a file that all its siblings run from: one broken-out guest could
 * poison them all. A private writable mapping needs only a readable file, so with this shim the file can be root's, mode 0444.
 *
 * FORKYARD_RAM_PATH names that file, exactly as on QEMU's command line.
 *
 * FORKYARD_KVM_FD is an inherited, open /dev/kvm: a VM's user need not be allowed to open the device, whose owner and mode
 * differ from one distribution to the next.
 *
 * FORKYARD_SHIM_FD is an inherited, listening unix socket. A thread serves one client at a time on it, with two requests:
 *
 *   MAP    map ranges of a file privately over memory: so a QEMU that started before a fork existed can become its child
 *   WATCH  let the kernel note which pages of memory are written (userfaultfd, asynchronous write-protection)
 *
 * A request is {u32 operation, u32 count} with one file descriptor beside it, then count × {u64 address, length, offset}.
 * The answer is an i32: 0, or the error number of the first range that failed. What the ranges mean, only the daemon knows.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/ioctl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

/* From linux/userfaultfd.h, spelled out: the headers this is built with may be older than the kernel it runs on. */
#define NEW_USERFAULTFD _IO(0xAA, 0x00)
#define USERFAULTFD_API _IOWR(0xAA, 0x3F, struct handshake)
#define USERFAULTFD_REGISTER _IOWR(0xAA, 0x00, struct registration)
#define API_VERSION 0xAA
#define FEATURE_WP (1 << 0)
#define FEATURE_WP_SHMEM (1 << 12)
#define FEATURE_WP_ASYNC (1 << 15)
#define MODE_WP 2

struct handshake {
    uint64_t version, features, ioctls;
};
struct registration {
    uint64_t start, length, mode, ioctls;
};

enum { MAP = 1, WATCH = 2, CHUNK = 256 };

struct request {
    uint32_t operation, count;
};
struct range {
    uint64_t address, length, offset;
};

static int (*next_open)(const char *, int, ...);
static const char *ram_path;
static int kvm_fd = -1, shim_fd = -1, watch_fd = -1;

static int map(int file, const struct range *range) {
    void *at = (void *)(uintptr_t)range->address;
    int flags = MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE;
    void *mapped = mmap(at, range->length, PROT_READ | PROT_WRITE, flags, file, (off_t)range->offset);
    return mapped == MAP_FAILED ? errno : 0;
}

/* `device` is /dev/userfaultfd. The new userfaultfd belongs to the address space of who asks for it: ours. */
static int watch(int device, const struct range *range) {
    if (watch_fd < 0) {
        struct handshake handshake = {API_VERSION, FEATURE_WP | FEATURE_WP_SHMEM | FEATURE_WP_ASYNC, 0};
        int fd = ioctl(device, NEW_USERFAULTFD, O_CLOEXEC | O_NONBLOCK);
        if (fd < 0)
            return errno;
        if (ioctl(fd, USERFAULTFD_API, &handshake)) {
            int error = errno;
            close(fd);
            return error;
        }
        watch_fd = fd;
    }
    struct registration registration = {range->address, range->length, MODE_WP, 0};
    return ioctl(watch_fd, USERFAULTFD_REGISTER, &registration) ? errno : 0;
}

static int receive(int client, void *buffer, size_t size) {
    return recv(client, buffer, size, MSG_WAITALL) == (ssize_t)size;
}

static int serve_request(int client) {
    struct request request;
    struct iovec data = {&request, sizeof request};
    union {
        char space[CMSG_SPACE(sizeof(int))];
        struct cmsghdr aligned;
    } control;
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    static struct range ranges[CHUNK]; /* static: this thread's stack is small */
    int32_t answer = 0;
    int file = -1;

    if (recvmsg(client, &message, MSG_WAITALL | MSG_CMSG_CLOEXEC) != sizeof request)
        return 0;
    struct cmsghdr *carried = CMSG_FIRSTHDR(&message);
    if (carried && carried->cmsg_level == SOL_SOCKET && carried->cmsg_type == SCM_RIGHTS)
        memcpy(&file, CMSG_DATA(carried), sizeof file);

    for (uint32_t done = 0; done < request.count;) {
        uint32_t now = request.count - done < CHUNK ? request.count - done : CHUNK;
        if (!receive(client, ranges, now * sizeof *ranges)) {
            close(file);
            return 0;
        }
        for (uint32_t i = 0; i < now && !answer; i++)
            answer = request.operation == MAP     ? map(file, &ranges[i])
                     : request.operation == WATCH ? watch(file, &ranges[i])
                                                  : EINVAL;
        done += now;
    }
    close(file);
    return send(client, &answer, sizeof answer, MSG_NOSIGNAL) == sizeof answer;
}

static void *serve(void *unused) {
    (void)unused;
    for (;;) {
        int client = accept4(shim_fd, NULL, NULL, SOCK_CLOEXEC);
        if (client < 0 && errno != EINTR && errno != ECONNABORTED && errno != EMFILE)
            return NULL;
        while (client >= 0 && serve_request(client))
            ;
        if (client >= 0)
            close(client);
    }
}

static void start_serving(void) {
    sigset_t all, before;
    pthread_attr_t attributes;
    pthread_t thread;
    /* QEMU's signals are meant for QEMU's threads. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 256 * 1024);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    if (pthread_create(&thread, &attributes, serve, NULL))
        close(shim_fd);
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

__attribute__((constructor)) static void initialise(void) {
    if (next_open)
        return;
    next_open = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, "open64");
    ram_path = getenv("FORKYARD_RAM_PATH");
    const char *kvm = getenv("FORKYARD_KVM_FD"), *shim = getenv("FORKYARD_SHIM_FD");
    if (kvm)
        kvm_fd = atoi(kvm);
    if (shim) {
        shim_fd = atoi(shim);
        start_serving();
    }
}

static int open_checked(const char *path, int flags, mode_t mode) {
    if (!next_open) /* a library's constructor ran before ours */
        initialise();
    if (ram_path && !strcmp(path, ram_path))
        flags = (flags & ~(O_ACCMODE | O_CREAT | O_TRUNC)) | O_RDONLY;
    if (kvm_fd >= 0 && !strcmp(path, "/dev/kvm"))
        return fcntl(kvm_fd, F_DUPFD_CLOEXEC, 3);
    return next_open(path, flags, mode);
}

int open64(const char *path, int flags, ...) {
    mode_t mode = 0;
    if (flags & (O_CREAT | __O_TMPFILE)) {
        va_list args;
        va_start(args, flags);
        mode = va_arg(args, mode_t);
        va_end(args);
    }
    return open_checked(path, flags, mode);
}

/* What open() with two arguments becomes in a hardened build, such as Debian's. */
int __open64_2(const char *path, int flags);
int __open64_2(const char *path, int flags) {
    return open_checked(path, flags, 0);
}
