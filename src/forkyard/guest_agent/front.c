/* The agent's front: what a machine that has just been restored must do before anybody can use it, in as little code as
 * possible.
 *
 *   front PORT|unix:PATH PROGRAM ARGS...      starts the agent: PROGRAM ARGS... --channel fd:3
 *
 * A restored machine under software emulation has translated nothing yet: every line of code that runs is slow once, and
 * an interpreter is much code. So the greeting (HELLO), the identity and mounts are answered here. All else is passed on to
 * the agent, byte for byte; PROTOCOL.md holds for both. The agent learns of a new host with the first request that is for it,
 * or a little later, when nobody waits.
 *
 * It never looks into a frame but HELLO, `identity` and `mount`. It holds at most a few frames in each direction: while one side
 * takes no more, the other is not read.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/random.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { HELLO = 1, HELLO_ACK, REQUEST, RESPONSE, NEED_HELLO = 10 };
enum { HEADER = 12, OVERHEAD = 16, MAX_BODY = 65536, MAX_FRAME = MAX_BODY + OVERHEAD, MAX_HELLO = 1024, PREFIX = 20 };
enum { FIRST_SLOT = 8, LAST_SLOT = 0x17 };
enum { PAGE = 4096, KERNEL_WRITE = 32 << 10, AGENT_FD = 3 };
/* Long enough for many machines that start together: what can wait takes no time from those that are waited for. */
#define INTRODUCE_AFTER_MS 10000

struct buffer {
    unsigned char *data;
    size_t size, from, to;
};
static unsigned char space[4][4 * MAX_FRAME];
static struct buffer heard = {space[0], sizeof *space, 0, 0};   /* from the host */
static struct buffer down = {space[1], sizeof *space, 0, 0};    /* to the agent */
static struct buffer answers = {space[2], sizeof *space, 0, 0}; /* from the agent */
static struct buffer up = {space[3], sizeof *space, 0, 0};      /* to the host */

static int own_machine; /* not a process among others, in a test */
static int port = -1, agent = -1;
static int port_in, port_out, agent_in, agent_out; /* whether it is worth trying */
static int lost = 1;                               /* looking for nothing but a HELLO */
static uint32_t epoch;                             /* of the host; 0: there is none */
static unsigned char hello[MAX_HELLO + OVERHEAD];
static size_t hello_size;
static int introduced; /* the agent knows of this host */
static unsigned char held[MAX_FRAME];
static size_t held_size;   /* an identity that the agent does not know of yet */
static uint32_t mute;      /* the stream whose answer was given here */
static int64_t introduce_at, asked_at = -1000;
static unsigned char about[MAX_HELLO]; /* what the agent says of itself in a HELLO_ACK */
static size_t about_size;

static uint32_t number(const unsigned char *at) {
    return (uint32_t)at[0] << 24 | at[1] << 16 | at[2] << 8 | at[3];
}

static void put_number(unsigned char *at, uint32_t value) {
    at[0] = value >> 24, at[1] = value >> 16, at[2] = value >> 8, at[3] = value;
}

static int64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000LL + now.tv_nsec / 1000000;
}

static size_t left(const struct buffer *b) {
    return b->to - b->from;
}

static size_t room(const struct buffer *b) {
    return b->size - left(b);
}

static void make_room(struct buffer *b) {
    if (b->from) {
        memmove(b->data, b->data + b->from, left(b));
        b->to -= b->from;
        b->from = 0;
    }
}

/* Callers have seen to the room. */
static void add(struct buffer *b, const void *data, size_t size) {
    if (b->size - b->to < size)
        make_room(b);
    memcpy(b->data + b->to, data, size);
    b->to += size;
}

static void add_frame(struct buffer *b, int type, uint32_t stream, const void *a, size_t na, const void *c, size_t nc,
                      uint32_t trailer) {
    unsigned char header[HEADER] = {'F', 'Y', type, 0}, end[4];
    put_number(header + 4, stream);
    put_number(header + 8, na + nc);
    put_number(end, trailer);
    add(b, header, HEADER);
    add(b, a, na);
    add(b, c, nc);
    add(b, end, 4);
}

static void ask_for_hello(void) {
    if (now_ms() - asked_at >= 1000 && room(&up) > OVERHEAD) {
        asked_at = now_ms();
        add_frame(&up, NEED_HELLO, 0, "", 0, "", 0, 0);
    }
}

/* ── the agent behind ──────────────────────────────────────────────────────────────────────────────────────────────── */

static void introduce(void) {
    if (introduced || !epoch)
        return;
    introduced = 1;
    add(&down, hello, hello_size);
    add(&down, held, held_size);
    held_size = 0;
}

static void forget_host(void) {
    up.from = up.to = 0;
    introduced = epoch = held_size = mute = 0;
}

/* The host is gone, and nobody knows when another comes: a greeting that nobody will follow up drops what was its. */
static void part(void) {
    static const char nobody[] = "{\"window\":0}";
    unsigned char body[PREFIX];
    uint32_t other;
    if (introduced) {
        if (getrandom(body, PREFIX, 0) != PREFIX)
            abort();
        body[0] |= 1; /* never 0, */
        other = number(body);
        if (other == epoch) /* nor known */
            put_number(body, ++other);
        add_frame(&down, HELLO, 0, body, PREFIX, nobody, sizeof nobody - 1, other);
    }
    forget_host();
}

/* ── identity ──────────────────────────────────────────────────────────────────────────────────────────────────────── */

static const char *value_of(const char *body, size_t size, const char *key) {
    /* The host writes these keys first and without spaces, and a quote inside a JSON text has a backslash before it. */
    const char *found = memmem(body, size, key, strlen(key));
    return found ? found + strlen(key) : NULL;
}

static int hex(char c) {
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* Clock, random numbers and name. 0 if the request is not as expected or something fails: then the agent sees to it. */
static int become(const char *body, size_t size) {
    struct {
        struct rand_pool_info info;
        unsigned char bytes[256];
    } entropy = {0};
    struct timespec now;
    char name[65];
    const char *end = body + size, *at = value_of(body, size, "\"hostname\":\"");
    size_t n = 0;
    if (!at)
        return 0;
    for (; at < end && *at != '"'; at++) {
        int letter = (*at >= 'a' && *at <= 'z') || (*at >= 'A' && *at <= 'Z') || (*at >= '0' && *at <= '9');
        if (n == 63 || !(letter || (*at == '-' && n)))
            return 0;
        name[n++] = *at;
    }
    size_t length = n;
    if (!(at = value_of(body, size, "\"entropy\":\"")))
        return 0;
    for (n = 0; at + 1 < end && *at != '"'; at += 2) {
        int high = hex(at[0]), low = hex(at[1]);
        if (n == sizeof entropy.bytes || high < 0 || low < 0)
            return 0;
        entropy.bytes[n++] = high << 4 | low;
    }
    entropy.info.entropy_count = n * 8;
    entropy.info.buf_size = n;
    if (!length || !n || !(at = value_of(body, size, "\"time_ns\":")))
        return 0;
    int64_t ns = 0;
    for (; at < end && *at >= '0' && *at <= '9'; at++)
        if (__builtin_mul_overflow(ns, 10, &ns) || __builtin_add_overflow(ns, *at - '0', &ns))
            return 0;
    now.tv_sec = ns / 1000000000, now.tv_nsec = ns % 1000000000;
    int device = open("/dev/urandom", O_RDWR | O_CLOEXEC);
    int done = device >= 0 && !clock_settime(CLOCK_REALTIME, &now) && !ioctl(device, RNDADDENTROPY, &entropy) &&
               !ioctl(device, RNDRESEEDCRNG) && !sethostname(name, length);
    close(device);
    return done;
}

static int take_identity(const unsigned char *frame, size_t size) {
    static const char asked[] = "{\"op\":\"identity\",", told[] = "{\"op\":\"adopted\", ";
    static const char ok[] = "{\"ok\":{}}";
    const char *body = (const char *)frame + HEADER;
    _Static_assert(sizeof asked == sizeof told, "one is written over the other");
    if (size < OVERHEAD + sizeof asked - 1 || memcmp(body, asked, sizeof asked - 1) || held_size || mute ||
        !become(body, size - OVERHEAD))
        return 0;
    mute = number(frame + 4);
    memcpy(held, frame, size);
    memcpy(held + HEADER, told, sizeof told - 1);
    held_size = size;
    if (introduced) {
        add(&down, held, held_size);
        held_size = 0;
    }
    add_frame(&up, RESPONSE, mute, ok, sizeof ok - 1, "", 0, epoch);
    return 1;
}

/* ── volumes ───────────────────────────────────────────────────────────────────────────────────────────────────────── */

/* The first name in a directory that begins so, put behind the directory's. */
static int go_down(char *path, size_t size, const char *begin) {
    DIR *directory = opendir(path);
    struct dirent *entry = NULL;
    while (directory && (entry = readdir(directory)))
        if (entry->d_name[0] != '.' && !strncmp(entry->d_name, begin, strlen(begin)))
            break;
    size_t length = strlen(path);
    int found = entry && (size_t)snprintf(path + length, size - length, "/%s", entry->d_name) < size - length;
    if (directory)
        closedir(directory);
    return found;
}

/* The drive of a slot (`volumes.py`), once the kernel has seen that there is something in it, which takes some milliseconds. */
static int drive_of(int slot, char *drive, size_t size) {
    char path[512];
    snprintf(path, sizeof path, "/sys/bus/pci/devices/0000:00:%02x.0", FIRST_SLOT + slot);
    if (!go_down(path, sizeof path - 16, "virtio"))
        return 0;
    strcat(path, "/block");
    if (!go_down(path, sizeof path - 16, ""))
        return 0;
    snprintf(drive, size, "/dev%s", strrchr(path, '/'));
    strcat(path, "/size");
    for (int looks = 0; looks < 200; looks++) {
        char first = '0';
        int file = open(path, O_RDONLY | O_CLOEXEC);
        int got = file >= 0 && read(file, &first, 1) == 1;
        if (file >= 0)
            close(file);
        if (!got || first != '0')
            return got;
        usleep(1000);
    }
    return 0;
}

/* 0 if the request is not as expected or something fails: then the agent sees to it, and says what is wrong. */
static int mount_volume(const char *body, size_t size) {
    char drive[64], path[1024];
    const char *end = body + size, *at = value_of(body, size, "\"slot\":");
    unsigned long flags = MS_NOSUID | MS_NODEV | MS_NOATIME;
    int slot = 0;
    size_t n = 0;
    if (!at || at >= end || *at < '0' || *at > '9')
        return 0;
    for (; at < end && *at >= '0' && *at <= '9' && slot < 100; at++)
        slot = slot * 10 + *at - '0';
    if (slot > LAST_SLOT || !(at = value_of(body, size, "\"path\":\"")) || at >= end || *at != '/')
        return 0;
    for (; at < end && *at != '"'; at++) {
        if (n == sizeof path - 1 || *at < ' ' || *at > '~' || *at == '\\')
            return 0;
        path[n++] = *at;
    }
    path[n] = 0;
    if (value_of(body, size, "\"read_only\":true"))
        flags |= MS_RDONLY;
    else if (!value_of(body, size, "\"read_only\":false"))
        return 0;
    if (!drive_of(slot, drive, sizeof drive))
        return 0;
    for (char *slash = path + 1; (slash = strchr(slash, '/')); *slash++ = '/') {
        *slash = 0;
        mkdir(path, 0755);
    }
    mkdir(path, 0755);
    return !mount(drive, path, "ext4", flags, NULL);
}

static int take_mount(const unsigned char *frame, size_t size) {
    static const char asked[] = "{\"op\":\"mount\",", ok[] = "{\"ok\":{}}";
    const char *body = (const char *)frame + HEADER;
    if (!own_machine || size < OVERHEAD + sizeof asked - 1 || memcmp(body, asked, sizeof asked - 1) ||
        !mount_volume(body, size - OVERHEAD))
        return 0;
    add_frame(&up, RESPONSE, number(frame + 4), ok, sizeof ok - 1, "", 0, epoch);
    return 1;
}

/* ── from the host ─────────────────────────────────────────────────────────────────────────────────────────────────── */

static void greet(const unsigned char *frame, size_t size) {
    if (size != hello_size || memcmp(frame, hello, size) || !epoch) {
        forget_host();
        memcpy(hello, frame, size);
        hello_size = size;
        epoch = number(frame + HEADER);
        introduce_at = now_ms() + INTRODUCE_AFTER_MS;
    }
    lost = 0;
    add_frame(&up, HELLO_ACK, 0, frame + HEADER + 4, 16, about, about_size, epoch);
}

/* One step through what was heard: 0 when more bytes, or more room to send, are needed. */
static int step(void) {
    const unsigned char *at = heard.data + heard.from;
    size_t available = left(&heard);
    /* Whatever this frame leads to fits: itself, a greeting and an identity down, an answer up. */
    if (!available || room(&down) < 3 * (size_t)MAX_FRAME || room(&up) < 2 * MAX_HELLO)
        return 0;
    if (lost) {
        static const unsigned char wanted[8] = {'F', 'Y', HELLO};
        const unsigned char *found = memmem(at, available, wanted, sizeof wanted);
        if (!found) {
            size_t keep = available < sizeof wanted ? available : sizeof wanted - 1;
            heard.from = heard.to - keep;
            return 0;
        }
        heard.from = found - heard.data;
        available = left(&heard);
        if (available < HEADER)
            return 0;
        size_t length = number(found + 8), size = length + OVERHEAD;
        if (length < PREFIX || length > MAX_HELLO) {
            heard.from++;
            return 1;
        }
        if (available < size)
            return 0;
        uint32_t trailer = number(found + HEADER + length);
        if (!trailer || trailer != number(found + HEADER)) {
            heard.from++;
            return 1;
        }
        greet(found, size);
        heard.from += size;
        return 1;
    }
    if (!*at) { /* padding */
        heard.from++;
        return 1;
    }
    size_t length = available < HEADER ? 0 : number(at + 8), size = length + OVERHEAD;
    if (*at != 'F' || (available > 1 && at[1] != 'Y') || length > MAX_BODY) {
        lost = 1;
        return 1;
    }
    if (available < size)
        return 0;
    if (at[2] == HELLO || number(at + HEADER + length) != epoch) {
        lost = 1;
        if (at[2] != HELLO)
            heard.from++;
        return 1;
    }
    if (at[2] != REQUEST || at[3] || !(take_identity(at, size) || take_mount(at, size))) {
        introduce();
        add(&down, at, size);
    }
    heard.from += size;
    return 1;
}

static void listen_to_host(void) {
    const unsigned char *at = heard.data + heard.from;
    int was_lost = lost, silence = !*at && !memcmp(at, at + 1, left(&heard) - 1);
    while (step())
        ;
    if (lost && !was_lost)
        part();
    if (lost && !silence)
        ask_for_hello();
}

static int read_port(void) {
    struct iovec pages[16];
    int count = 0;
    if (!port_in || room(&heard) < MAX_BODY || !about_size)
        return 0;
    make_room(&heard);
    /* The driver hands out one page per read; a list of pages lets one system call take several. */
    for (size_t at = heard.to; count < 16; at += PAGE)
        pages[count++] = (struct iovec){heard.data + at, PAGE};
    ssize_t got = readv(port, pages, count);
    if (got > 0) {
        heard.to += got;
        return 1;
    }
    port_in = 0;
    if (got < 0 && (errno == EAGAIN || errno == EINTR))
        return 0;
    /* The host left. A port tells when the next comes; a socket, or a port that broke, is opened anew. */
    struct stat status;
    int keep = got == 0 && !fstat(port, &status) && S_ISCHR(status.st_mode);
    heard.from = heard.to = 0;
    part();
    lost = 1;
    if (!keep) {
        close(port);
        port = -1;
    }
    return 0;
}

/* ── from the agent ────────────────────────────────────────────────────────────────────────────────────────────────── */

static int read_agent(void) {
    if (!agent_in || room(&answers) < MAX_BODY)
        return 0;
    make_room(&answers);
    ssize_t got = read(agent, answers.data + answers.to, answers.size - answers.to);
    if (got > 0) {
        answers.to += got;
        return 1;
    }
    if (got == 0 || (errno != EAGAIN && errno != EINTR))
        exit(1); /* systemd starts both again */
    agent_in = 0;
    return 0;
}

static int pass_answer(void) {
    const unsigned char *at = answers.data + answers.from;
    if (left(&answers) < OVERHEAD)
        return 0;
    size_t length = number(at + 8), size = length + OVERHEAD;
    if (at[0] != 'F' || at[1] != 'Y' || length > MAX_BODY)
        exit(1);
    if (left(&answers) < size || room(&up) < size)
        return 0;
    uint32_t trailer = number(at + HEADER + length), stream = number(at + 4);
    if (at[2] == HELLO_ACK) { /* its greeting to us, or one that we have answered */
        if (!trailer && length >= 16 && length - 16 <= sizeof about) {
            about_size = length - 16;
            memcpy(about, at + HEADER + 16, about_size);
            ask_for_hello();
        }
    } else if (epoch && trailer == epoch && at[2] == RESPONSE && mute && stream == mute)
        mute = 0;
    else if (epoch && (trailer == epoch || (at[2] == NEED_HELLO && introduced)))
        add(&up, at, size);
    answers.from += size;
    return 1;
}

/* ── both ways ─────────────────────────────────────────────────────────────────────────────────────────────────────── */

static int drain(int fd, struct buffer *b, int *worth, size_t most) {
    size_t size = left(b) < most ? left(b) : most;
    if (!size || !*worth)
        return 0;
    ssize_t written = write(fd, b->data + b->from, size);
    if (written > 0) {
        b->from += written;
        return 1;
    }
    if (errno != EAGAIN && errno != EINTR && fd == agent)
        exit(1);
    *worth = 0;
    return 0;
}

static int open_port(const char *name) {
    if (strncmp(name, "unix:", 5))
        return open(name, O_RDWR | O_NONBLOCK | O_CLOEXEC);
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    strncpy(address.sun_path, name + 5, sizeof address.sun_path - 1);
    if (fd >= 0 && (connect(fd, (struct sockaddr *)&address, sizeof address) || fcntl(fd, F_SETFL, O_NONBLOCK))) {
        close(fd);
        fd = -1;
    }
    return fd;
}

static void start_agent(char **argv) {
    int pair[2], count = 0;
    while (argv[count])
        count++;
    char **words = calloc(count + 3, sizeof *words);
    if (!words || socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair))
        exit(1);
    memcpy(words, argv, count * sizeof *words);
    words[count] = "--channel";
    words[count + 1] = "fd:3";
    pid_t child = fork();
    if (child < 0)
        exit(1);
    if (!child) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (pair[1] == AGENT_FD ? fcntl(AGENT_FD, F_SETFD, 0) : dup2(pair[1], AGENT_FD) < 0)
            _exit(127);
        execv(words[0], words);
        _exit(127);
    }
    free(words);
    close(pair[1]);
    agent = pair[0];
}

int main(int argc, char **argv) {
    if (argc < 3) {
        fputs("front PORT|unix:PATH PROGRAM ARGS...\n", stderr);
        return 2;
    }
    signal(SIGPIPE, SIG_IGN);
    start_agent(argv + 2);
    own_machine = !!strncmp(argv[1], "unix:", 5);
    /* Whoever else reacts to a new clock or an interrupt does so after the answer. */
    if (own_machine)
        sched_setscheduler(0, SCHED_FIFO, &(struct sched_param){.sched_priority = 1});
    int events = epoll_create1(EPOLL_CLOEXEC);
    /* Edge-triggered: a port whose host end is closed is always "ready" and would keep us spinning. */
    struct epoll_event all = {.events = EPOLLIN | EPOLLOUT | EPOLLET, .data.fd = agent}, got[4];
    if (events < 0 || epoll_ctl(events, EPOLL_CTL_ADD, agent, &all))
        return 1;
    agent_in = agent_out = 1;
    for (;;) {
        if (port < 0 && (port = open_port(argv[1])) >= 0) {
            all.data.fd = port;
            if (epoll_ctl(events, EPOLL_CTL_ADD, port, &all))
                return 1;
            port_in = port_out = 1;
            if (about_size)
                ask_for_hello();
        }
        for (int busy = 1; busy;) {
            busy = read_port();
            if (left(&heard))
                listen_to_host();
            busy |= drain(port, &up, &port_out, KERNEL_WRITE); /* at once: somebody waits for this machine to wake up */
            busy |= drain(agent, &down, &agent_out, down.size);
            busy |= read_agent();
            while (pass_answer())
                busy = 1;
        }
        int64_t wait_ms = -1;
        if (epoch && !introduced && room(&down) >= 2 * (size_t)MAX_FRAME) {
            wait_ms = introduce_at - now_ms();
            if (wait_ms <= 0) {
                introduce();
                continue;
            }
        }
        if (port < 0 && (wait_ms < 0 || wait_ms > 50))
            wait_ms = 50;
        int count = epoll_wait(events, got, 4, wait_ms);
        for (int i = 0; i < count; i++) {
            int in = !!(got[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)), out = !!(got[i].events & EPOLLOUT);
            if (got[i].data.fd == agent)
                agent_in |= in, agent_out |= out;
            else
                port_in |= in, port_out |= out;
        }
    }
}
