/* The only program of the probe guest: says that user mode works, and powers off. No C library: the whole guest is a kernel
 * and this. */
static long call(long number, long a, long b, long c, long d) {
    long result;
    register long r10 __asm__("r10") = d;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10) : "rcx", "r11", "memory");
    return result;
}

enum { SYS_WRITE = 1, SYS_REBOOT = 169 };

void _start(void) {
    static const char message[] = "forkyard: probe guest ran\n";
    call(SYS_WRITE, 1, (long)message, sizeof message - 1, 0); /* the kernel opened /dev/console as 0, 1 and 2 */
    call(SYS_REBOOT, 0xfee1dead, 0x28121969, 0x4321fedc, 0);
    for (;;) {
    }
}
