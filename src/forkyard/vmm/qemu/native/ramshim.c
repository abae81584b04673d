/* Preloaded into QEMU: changes how it opens two files.
 *
 * A sandbox maps its template's RAM copy-on-write. QEMU 7.2 opens the file of a private memory backend for writing all the
 * same, so every VM's user would need write permission on a file that all its siblings run from: one broken-out guest could
 * poison them all. A private writable mapping needs only a readable file, so with this shim the file can be root's, mode 0444.
 *
 * FORKYARD_RAM_PATH names that file, exactly as on QEMU's command line.
 *
 * FORKYARD_KVM_FD is an inherited, open /dev/kvm: a VM's user need not be allowed to open the device, whose owner and mode
 * differ from one distribution to the next.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static int (*next_open)(const char *, int, ...);
static const char *ram_path;
static int kvm_fd = -1;

__attribute__((constructor)) static void initialise(void) {
    next_open = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, "open64");
    ram_path = getenv("FORKYARD_RAM_PATH");
    const char *kvm = getenv("FORKYARD_KVM_FD");
    if (kvm)
        kvm_fd = atoi(kvm);
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
