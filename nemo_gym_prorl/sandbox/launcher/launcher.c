// SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
// SPDX-License-Identifier: Apache-2.0
/*
 * The launcher: the only program of this package that runs in a sandbox. It starts all processes of sandboxes.
 *
 * With argv[0] "launcher" the program waits on a socket for requests of the supervisor, and forks a child for each
 * request. That child is a child of the supervisor (CLONE_PARENT), starts in the sandbox's control group, and does one
 * of these:
 *
 *   make     start the first process of a new sandbox, in new namespaces; that process sets the sandbox up
 *   spawn    join a sandbox, start a process there, and execute a program
 *   prepare  join a sandbox that the container runtime started, and adjust it to match one made here
 *   put, get join a sandbox, and copy a file in or out
 *   stop     join a sandbox, and stop all of its processes but the first
 *   listen   join a sandbox, and open a listening socket on its loopback device
 *   erase    remove the control group and the files of an ended sandbox
 *
 * With argv[0] "sandbox" the program is the first process of a sandbox, and only waits. With "eraser" it removes a
 * folder for any process.
 *
 * The program uses no C library and no threads, and allocates memory only with mmap. A request consists of descriptors,
 * words of eight bytes and NUL-terminated texts, which requests.py writes in the order in which they are read here.
 * Requests are trusted. Files and processes of a sandbox are untrusted: names are looked up in the sandbox's own root,
 * no child waits for a sandboxed process without a limit, and a process that joins a sandbox cannot be traced.
 */

#define _GNU_SOURCE
#include <asm/ioctls.h>
#include <asm/termbits.h>
#include <asm/unistd.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/mount.h>
#include <linux/openat2.h>
#include <linux/prctl.h>
#include <linux/sched.h>
#include <linux/seccomp.h>
#include <linux/securebits.h>
#include <linux/stat.h>
#include <stddef.h>
#include <stdint.h>

#define SIGKILL 9
#define SIGCHLD 17
#define SIGSTOP 19
#define SIGXFSZ 25
#define SIG_IGN 1
#define SIG_SETMASK 2
#define LAST_SIGNAL 64

/* Kernel structures and constants that the included headers lack. */
struct vector { void *base; size_t length; };
struct message {
    void *name;
    uint64_t name_length;
    struct vector *vectors;
    size_t count;
    void *control;
    size_t room;
    uint64_t flags;
};
struct control { size_t length; int level, kind; };
struct limit { uint64_t soft, hard; };
struct polled { int file; short events, returned; };
struct moment { long seconds, nanoseconds; };
struct interface { char name[16]; short flags; char rest[22]; };
struct window { uint16_t rows, columns, x, y; };
struct address { uint16_t family; unsigned char port[2], host[4], zero[8]; };

enum { SOL_SOCKET = 1, SCM_RIGHTS = 1, SO_REUSEADDR = 2 };
enum { MSG_CTRUNC = 8, MSG_TRUNC = 0x20, MSG_NOSIGNAL = 0x4000, MSG_CMSG_CLOEXEC = 0x40000000 };
enum { AF_INET = 2 };
enum { SOCK_STREAM = 1, SOCK_DGRAM = 2, SOCK_CLOEXEC = 02000000 };
enum { PROT_READ = 1, PROT_WRITE = 2, MAP_PRIVATE = 2, MAP_ANONYMOUS = 0x20, POLLIN = 1, RLIMIT_NPROC = 6 };
enum { MNT_DETACH = 2, UMOUNT_NOFOLLOW = 8, PROC_SUPER_MAGIC = 0x9fa0, PROC_ROOT_INODE = 1 };
enum { SIOCSIFFLAGS = 0x8914, IFF_UP = 1 };

/* Architecture: a system call, and the first instructions. */

static long call6(long number, long a, long b, long c, long d, long e, long f) {
#if defined(__x86_64__)
    long result;
    register long r10 __asm__("r10") = d, r8 __asm__("r8") = e, r9 __asm__("r9") = f;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return result;
#elif defined(__aarch64__)
    register long x8 __asm__("x8") = number, x0 __asm__("x0") = a, x1 __asm__("x1") = b, x2 __asm__("x2") = c;
    register long x3 __asm__("x3") = d, x4 __asm__("x4") = e, x5 __asm__("x5") = f;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
    return x0;
#else
#error "this architecture is not known"
#endif
}

#if defined(__x86_64__)
__asm__(".globl _start\n_start:\n xor %ebp, %ebp\n lea 8(%rsp), %rdi\n and $-16, %rsp\n call begin\n hlt\n");
#else
__asm__(".globl _start\n_start:\n add x0, sp, 8\n bl begin\n brk 1\n");
#endif

#define PICK(_0, _1, _2, _3, _4, _5, _6, name, ...) name
#define CALL(...) PICK(__VA_ARGS__, CALL6, CALL5, CALL4, CALL3, CALL2, CALL1, CALL0)(__VA_ARGS__)
#define CALL0(n) call6(__NR_##n, 0, 0, 0, 0, 0, 0)
#define CALL1(n, a) call6(__NR_##n, (long)(a), 0, 0, 0, 0, 0)
#define CALL2(n, a, b) call6(__NR_##n, (long)(a), (long)(b), 0, 0, 0, 0)
#define CALL3(n, a, b, c) call6(__NR_##n, (long)(a), (long)(b), (long)(c), 0, 0, 0)
#define CALL4(n, a, b, c, d) call6(__NR_##n, (long)(a), (long)(b), (long)(c), (long)(d), 0, 0)
#define CALL5(n, a, b, c, d, e) call6(__NR_##n, (long)(a), (long)(b), (long)(c), (long)(d), (long)(e), 0)
#define CALL6(n, a, b, c, d, e, f) call6(__NR_##n, (long)(a), (long)(b), (long)(c), (long)(d), (long)(e), (long)(f))

/* Functions to which the compiler may emit calls, and which a C library would provide. */

void *memset(void *target, int byte, size_t size) {
    for (unsigned char *at = target; size--;)
        *at++ = (unsigned char)byte;
    return target;
}

void *memcpy(void *target, const void *source, size_t size) {
    const unsigned char *from = source;
    for (unsigned char *at = target; size--;)
        *at++ = *from++;
    return target;
}

static size_t length(const char *text) {
    size_t count = 0;
    while (text[count])
        count++;
    return count;
}

static int same(const char *one, const char *other, size_t count) {
    for (size_t index = 0; index < count; index++)
        if (one[index] != other[index])
            return 0;
    return 1;
}

/* Replies: the result, or the step that failed. */

enum { STARTED = 1, READY, DONE, FAILED, LOST, EXHAUSTED, KILLED, NO_USER, OTHER_USER };

enum { CHANNEL = 3, MAX_FILES = 64, HIGH = 128, MAX_STEP_BYTES = 4096, MAX_PATH = 4096 };

static struct answer { int32_t kind, number; char words[MAX_STEP_BYTES]; } answer;
static int report;            /* reply socket; if negative, only the exit code reports errors */
static int has_go;            /* whether this process has received GO from the supervisor */
static const char *step, *of; /* current step and its object, for error messages */
static int is_joining;        /* whether a failure means that the sandbox has ended */

static void end(int code) __attribute__((noreturn));
static void end(int code) {
    for (;;)
        CALL(exit_group, code);
}

static long send_message(int channel, const void *data, size_t size, int file) {
    struct { struct control head; int file, padding; } rights = {
        {sizeof(struct control) + sizeof(int), SOL_SOCKET, SCM_RIGHTS}, file, 0};
    struct vector vector = {(void *)data, size};
    struct message message = {0, 0, &vector, 1, &rights, sizeof rights, 0};
    if (file < 0)
        message.control = 0, message.room = 0;
    return CALL(sendmsg, channel, &message, MSG_NOSIGNAL);
}

/* Send a reply, with a descriptor if "file" is not negative. */
static long reply(int kind, long number, int file) {
    size_t size = 0;
    const char *parts[] = {step, *of ? " " : "", of};
    for (int part = 0; part < 3; part++)
        for (const char *at = parts[part]; *at && size < MAX_STEP_BYTES; at++)
            answer.words[size++] = *at;
    answer.kind = kind;
    answer.number = (int32_t)number;
    return send_message(report, &answer, offsetof(struct answer, words) + size, file);
}

/* Wait for GO, which the supervisor sends once it has registered this process. If the launcher was killed before it
   reported this process, the supervisor closes the socket and repeats the request, and this process exits. */
static void wait_for_go(void) {
    char word;
    if (CALL(read, report, &word, 1) != 1)
        end(127);
    has_go = 1;
}

static void fail(int kind, long number) __attribute__((noreturn));
static void fail(int kind, long number) {
    if (report < 0)
        end((int)number);
    /* Closing the socket with an unread GO would discard the reply. */
    if (!has_go)
        wait_for_go();
    reply(kind, number, -1);
    end(127);
}

static int is_error(long result) {
    return result < 0 && result > -4096;
}

/* Return the result of a system call that must succeed; otherwise reply with the error and exit. */
static long must(long result) {
    if (is_error(result))
        fail(is_joining && result != -EAGAIN ? LOST : FAILED, -result);
    return result;
}

/* As must, but return to the caller if the result is "error". */
static long unless(long error, long result) {
    return result == -error ? result : must(result);
}

static void doing(const char *what, const char *whose) {
    step = what;
    of = whose;
}

/* Requests: fields are read in order, and never beyond the request's end. */

static char packet[1 << 16];
static const char *at, *limit;
static int files[MAX_FILES], count_of_files;

static uint64_t word(void) {
    uint64_t value;
    if (limit - at < (ptrdiff_t)sizeof value)
        fail(FAILED, EBADMSG);
    memcpy(&value, at, sizeof value);
    at += sizeof value;
    return value;
}

static const char *text(void) {
    const char *begin = at;
    while (at < limit && *at)
        at++;
    if (at == limit)
        fail(FAILED, EBADMSG);
    at++;
    return begin;
}

static const char *bytes(size_t *size) {
    const char *begin = (*size = word(), at);
    if ((size_t)(limit - at) < *size)
        fail(FAILED, EBADMSG);
    at += *size;
    return begin;
}

/* Read the count of the items that follow; each takes at least one byte, which bounds the count. */
static size_t read_count(void) {
    size_t count = word();
    if (count > (size_t)(limit - at))
        fail(FAILED, EBADMSG);
    return count;
}

static int file(int index) {
    if (index >= count_of_files)
        fail(FAILED, EBADMSG);
    return files[index];
}

static void *allocate(size_t size) {
    return (void *)must(CALL(mmap, 0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
}

/* Read a count and as many texts into an array that ends with a null pointer, with space for "more" texts. */
static const char **texts(size_t more, size_t *count) {
    size_t found = read_count();
    const char **all = allocate((found + more + 1) * sizeof *all);
    for (size_t index = 0; index < found; index++)
        all[index] = text();
    if (count)
        *count = found;
    return all;
}

/* Helpers. */

static char *digits(char *target, unsigned long number) {
    char reversed[24];
    int size = 0;
    do
        reversed[size++] = (char)('0' + number % 10);
    while (number /= 10);
    while (size)
        *target++ = reversed[--size];
    return target;
}

/* Write the path "/proc/PID" and "rest". */
static const char *proc_path(char *target, unsigned long process, const char *rest) {
    memcpy(target, "/proc/", 6);
    char *tail = digits(target + 6, process);
    memcpy(tail, rest, length(rest) + 1);
    return target;
}

static void set_limit(int which, uint64_t soft, uint64_t hard) {
    struct limit given = {soft, hard};
    must(CALL(prlimit64, 0, which, &given, 0));
}

static void set_limits(void) {
    for (size_t count = read_count(); count--;) {
        int which = (int)word();
        uint64_t soft = word();
        set_limit(which, soft, word());
    }
}

static void become_user(unsigned uid, unsigned gid) {
    /* The kernel refuses setgroups if an ordinary user has written the id maps (/proc/PID/setgroups is "deny"). */
    unless(EPERM, CALL(setgroups, 0, 0));
    /* Keep the capabilities when the user id changes, until this process executes a program. */
    must(CALL(prctl, PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP, 0, 0, 0));
    must(CALL(setresgid, gid, gid, gid));
    must(CALL(setresuid, uid, uid, uid));
    /* Changing user ids clears PDEATHSIG; set it again. */
    must(CALL(prctl, PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0));
}

static void install_filter(const char *rules, size_t size) {
    struct sock_fprog program = {(unsigned short)(size / sizeof(struct sock_filter)), (struct sock_filter *)rules};
    doing("system call filter", "");
    must(CALL(seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_SPEC_ALLOW, &program));
}

/* Open a file of the host by a trusted path. */
static int open_own(const char *path, int flags) {
    return (int)must(CALL(openat, AT_FDCWD, path, flags | O_CLOEXEC, 0));
}

static struct statx stat_of(long file) {
    struct statx found;
    memset(&found, 0, sizeof found);
    must(CALL(statx, file, "", AT_EMPTY_PATH, STATX_BASIC_STATS, &found));
    return found;
}

/* Open a path relative to a folder, without following magic links of /proc and without blocking on pipes. */
static long open_in(long folder, const char *path, int flags) {
    flags |= O_CLOEXEC | (flags & O_PATH ? 0 : O_NONBLOCK | O_NOCTTY);
    struct open_how how = {(uint64_t)flags, 0, RESOLVE_NO_MAGICLINKS};
    long found = CALL(openat2, folder, path, &how, sizeof how);
    if (found == -ENOSYS || found == -EPERM) /* before Linux 5.6, or where a container's filter refuses it */
        found = CALL(openat, folder, path, how.flags, 0);
    return found;
}

static long open_inside(const char *path, int flags) {
    return open_in(AT_FDCWD, path, flags);
}

static void ignore(int signal) {
    unsigned long ignored[4] = {SIG_IGN, 0, 0, 0};
    must(CALL(rt_sigaction, signal, ignored, 0, 8));
}

static void pause_ms(long milliseconds) {
    struct moment pause = {0, milliseconds * 1000000};
    CALL(nanosleep, &pause, 0);
}

/* Reduce the capabilities of this process to a bit mask, until a program is executed. */
static void keep_rights(uint64_t kept) {
    struct __user_cap_header_struct version = {_LINUX_CAPABILITY_VERSION_3, 0};
    uint32_t low = (uint32_t)kept, high = (uint32_t)(kept >> 32);
    struct __user_cap_data_struct rights[2] = {{low, low, 0}, {high, high, 0}};
    must(CALL(capset, &version, rights));
}

/* Join. */

static const struct { const char *path; uint64_t flag; } SPACES[] = {
    {"ns/user", CLONE_NEWUSER}, /* first: joining it grants the capability to join the others */
    {"ns/mnt", CLONE_NEWNS},
    {"ns/pid", CLONE_NEWPID},
    {"ns/ipc", CLONE_NEWIPC},
    {"ns/net", CLONE_NEWNET},
    {"ns/uts", CLONE_NEWUTS},
    {"ns/cgroup", CLONE_NEWCGROUP},
};

enum { COUNT_OF_SPACES = sizeof SPACES / sizeof *SPACES };

/* Join namespaces of a process, given a descriptor of its /proc folder, which never refers to a later process with the
   same pid. All namespaces are opened before the first is joined: afterwards the host's /proc may be inaccessible. */
static void enter(int process, uint64_t spaces) {
    int namespace_fds[COUNT_OF_SPACES];
    if (!(spaces & CLONE_NEWUSER)) /* every sandbox has a user namespace */
        fail(FAILED, EBADMSG);
    for (int index = 0; index < COUNT_OF_SPACES; index++)
        if (spaces & SPACES[index].flag)
            namespace_fds[index] = (int)must(CALL(openat, process, SPACES[index].path, O_RDONLY | O_CLOEXEC, 0));
    for (int index = 0; index < COUNT_OF_SPACES; index++)
        if (spaces & SPACES[index].flag) {
            must(CALL(setns, namespace_fds[index], SPACES[index].flag));
            CALL(close, namespace_fds[index]);
        }
}

/* Join a sandbox's namespaces and root folder as its user, whose id is returned. Processes forked from now on are in
   the sandbox's PID namespace. */
static unsigned join(void) {
    unsigned uid = (unsigned)word();
    uint64_t spaces = word();
    int process = file(1), rooted = (int)word();
    doing("the sandbox can't be joined", "");
    is_joining = 1;
    /* Non-dumpable before joining: no sandboxed process may trace this process, read its memory or open its files. */
    must(CALL(prctl, PR_SET_DUMPABLE, 0, 0, 0, 0));
    enter(process, spaces);
    become_user(uid, uid);
    /* Changing ids has reset the dumpable flag to the host's fs.suid_dumpable. */
    must(CALL(prctl, PR_SET_DUMPABLE, 0, 0, 0, 0));
    if (!rooted) {
        /* Opened as the sandbox's user, since a root on a FUSE file system is accessible only to that user. */
        long root = must(CALL(openat, process, "root", O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0));
        must(CALL(fchdir, root));
        must(CALL(chroot, "."));
        CALL(close, root);
    }
    /* Close the host's /proc folder: /proc/self/fd would lead a process that is forked here out of the sandbox. */
    CALL(close, process);
    is_joining = 0;
    return uid;
}

/* Spawn. */

/* Open both ends of a new terminal of the sandbox, which neither echoes input nor translates line ends to CR LF. */
static int open_terminal(int *controlling, unsigned rows, unsigned columns) {
    int unlocked = 0;
    struct window window = {(uint16_t)rows, (uint16_t)columns, 0, 0};
    struct termios mode;
    doing("terminal", "");
    long opened = open_inside("/dev/pts/ptmx", O_RDWR);
    if (opened == -ENOSPC) {
        doing("terminals", "");
        fail(EXHAUSTED, 0);
    }
    *controlling = (int)must(opened);
    must(CALL(fcntl, opened, F_SETFL, O_RDWR));
    must(CALL(ioctl, opened, TIOCSPTLCK, &unlocked));
    int terminal = (int)must(CALL(ioctl, opened, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC));
    must(CALL(ioctl, terminal, TCGETS, &mode));
    mode.c_oflag &= ~(unsigned)ONLCR;
    mode.c_lflag &= ~(unsigned)(ECHO | ECHOE | ECHOK | ECHOCTL | ECHOKE);
    must(CALL(ioctl, terminal, TCSETS, &mode));
    must(CALL(ioctl, terminal, TIOCSWINSZ, &window));
    return terminal;
}

static long fork_sibling(void) {
    return CALL(clone, CLONE_PARENT | SIGCHLD, 0, 0, 0, 0);
}

/* Fork a process if the sandbox's limit allows two more processes, since nearly every program starts another. */
static long fork_within_limit(uint64_t most) {
    static const long pauses_ms[] = {5, 15, 30, 0};
    struct limit before;
    doing("start", "");
    must(CALL(prlimit64, 0, RLIMIT_NPROC, 0, &before));
    if (most) /* this process counts against the limit until it exits, in place of the second process */
        set_limit(RLIMIT_NPROC, most < before.hard ? most : before.hard, before.hard);
    for (int index = 0;; index++) {
        long process = fork_sibling();
        if (process == 0 && most)
            set_limit(RLIMIT_NPROC, before.soft, before.hard);
        if (process >= 0)
            return process;
        if (process != -EAGAIN) {
            doing("the sandbox has ended", "");
            fail(LOST, -process);
        }
        if (!pauses_ms[index])
            break;
        /* Other joiners and zombies, which count, too, may be about to end. */
        pause_ms(pauses_ms[index]);
    }
    if (most)
        set_limit(RLIMIT_NPROC, before.soft, before.hard);
    /* If a fork without the sandbox's own limit fails, the machine or user is the cause. */
    if (must(fork_sibling()) == 0)
        end(0);
    doing("processes", "");
    fail(EXHAUSTED, 0);
}

/* Accounts: read from the image's /etc/passwd and /etc/group. A C library would load plug-ins of the image. */

enum { MAX_TABLE_BYTES = 1 << 24, MAX_GROUPS = 1 << 16, FIELDS = 7 };

struct table { const char *at, *end; };
struct field { const char *text; size_t size; };

/* Read a regular file, up to MAX_TABLE_BYTES; empty if there is none. */
static struct table table_of(const char *path) {
    struct table found = {"", ""};
    long opened = open_inside(path, O_RDONLY);
    if (is_error(opened))
        return found;
    /* Check the opened file, since the name may lead to a pipe by now. */
    if (S_ISREG(stat_of(opened).stx_mode)) {
        char *content = allocate(MAX_TABLE_BYTES);
        size_t size = 0;
        long done;
        while (size < MAX_TABLE_BYTES && (done = CALL(read, opened, content + size, MAX_TABLE_BYTES - size)) > 0)
            size += (size_t)done;
        found.at = content;
        found.end = content + size;
    }
    CALL(close, opened);
    return found;
}

/* Read the fields of the next line, separated by "between"; return their count, 0 at the end of the table. */
static int line_of(struct table *table, struct field *fields, char between) {
    int count = 0;
    if (table->at == table->end)
        return 0;
    for (const char *begin = table->at;; table->at++) {
        int last = table->at == table->end || *table->at == '\n';
        if (!last && *table->at != between)
            continue;
        if (count < FIELDS)
            fields[count] = (struct field){begin, (size_t)(table->at - begin)};
        count++;
        begin = table->at + 1;
        if (last)
            break;
    }
    if (table->at < table->end)
        table->at++;
    return count;
}

static int is_text(struct field field, const char *wanted) {
    return field.size == length(wanted) && same(field.text, wanted, field.size);
}

/* Return the number in a field; -1 if the field is no number, UINT32_MAX if the number is too large for an id. */
static long number_of(struct field field) {
    long number = 0;
    if (!field.size)
        return -1;
    for (size_t index = 0; index < field.size; index++) {
        if (field.text[index] < '0' || field.text[index] > '9')
            return -1;
        if (number < UINT32_MAX)
            number = number * 10 + field.text[index] - '0';
    }
    return number < UINT32_MAX ? number : UINT32_MAX;
}

static int is_member(struct field members, struct field name) {
    for (size_t begin = 0, index = 0; index <= members.size; index++)
        if (index == members.size || members.text[index] == ',') {
            if (index - begin == name.size && same(members.text + begin, name.text, name.size))
                return 1;
            begin = index + 1;
        }
    return 0;
}

/* Set an environment variable, or add it to the array, which must have space; return the new count. */
static size_t set_variable(const char **variables, size_t count, const char *name, struct field value) {
    size_t size = length(name), found = 0;
    while (found < count && !same(variables[found], name, size))
        found++;
    char *fresh = allocate(size + value.size + 1);
    memcpy(fresh, name, size);
    memcpy(fresh + size, value.text, value.size);
    variables[found] = fresh;
    return found == count ? count + 1 : count;
}

/* Become the user with a name or number in /etc/passwd, and set HOME, USER and LOGNAME. */
static void become_account(const char *wanted, unsigned uid, const char **variables, size_t count, int has_terminal) {
    struct field user[FIELDS], group[FIELDS];
    struct table table = table_of("/etc/passwd");
    long own = -1, gid = -1;
    doing(wanted, "");
    for (int fields; (fields = line_of(&table, user, ':'));) {
        long number = fields < 6 ? -1 : number_of(user[2]);
        gid = number < 0 ? -1 : number_of(user[3]);
        if (gid < 0)
            continue;
        char written[24];
        struct field in_digits = {written, (size_t)(digits(written, (unsigned long)number) - written)};
        if (is_text(user[0], wanted) || (number < UINT32_MAX && is_text(in_digits, wanted))) {
            own = number;
            break;
        }
    }
    if (own < 0)
        fail(NO_USER, EINVAL);
    if (own == (long)uid)
        return;
    /* Programs also open their terminal by path, such as a shell session for each command, so they must own it. */
    if (has_terminal && is_error(CALL(fchown, 0, own, -1)))
        fail(OTHER_USER, EINVAL);
    uint32_t *groups = allocate(MAX_GROUPS * sizeof *groups);
    size_t found = 0;
    long other, unknown = own == UINT32_MAX || gid == UINT32_MAX;
    groups[found++] = (uint32_t)gid;
    table = table_of("/etc/group");
    for (int fields; (fields = line_of(&table, group, ':'));)
        if (fields == 4 && (other = number_of(group[2])) >= 0 && is_member(group[3], user[0]) && found < MAX_GROUPS) {
            groups[found++] = (uint32_t)other;
            unknown |= other == UINT32_MAX;
        }
    if (unknown || is_error(CALL(setgroups, found, groups)) || is_error(CALL(setresgid, gid, gid, gid)) ||
        is_error(CALL(setresuid, own, own, own)))
        fail(OTHER_USER, EINVAL);
    /* Changing ids has reset the dumpable flag; see join. */
    must(CALL(prctl, PR_SET_DUMPABLE, 0, 0, 0, 0));
    static const struct field root = {"/", 1};
    count = set_variable(variables, count, "HOME=", user[5].size ? user[5] : root);
    count = set_variable(variables, count, "USER=", user[0]);
    set_variable(variables, count, "LOGNAME=", user[0]);
}

/* Limit the capabilities of all programs that this process executes to a bit mask. */
static void bound_rights(uint64_t kept) {
    for (int number = 0; number < 64 && !is_error(CALL(prctl, PR_CAPBSET_READ, number, 0, 0, 0)); number++)
        if (!(kept >> number & 1))
            must(CALL(prctl, PR_CAPBSET_DROP, number, 0, 0, 0));
    must(CALL(prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
}

/* Execute a program of one folder of PATH; return the error. */
static long execute_in(const char *folder, const char **argv, const char **env) {
    char path[MAX_PATH];
    size_t above = length(folder), size = length(argv[0]) + 1;
    if (above + 1 + size > sizeof path)
        return -ENAMETOOLONG;
    memcpy(path, folder, above);
    if (above && path[above - 1] != '/')
        path[above++] = '/';
    memcpy(path + above, argv[0], size);
    return CALL(execve, path, argv, env);
}

/* In the new process, in the sandbox's PID namespace: execute the program, with "sources" as its files from 0 on. */
static void execute(unsigned uid, int *sources, int count, int has_terminal) {
    doing("start", "");
    must(CALL(setsid));
    if (has_terminal)
        must(CALL(ioctl, sources[0], TIOCSCTTY, 0));
    /* First duplicate all sources to high descriptors, since a source may have the number that another source gets. The
       high descriptors are closed on exec. */
    report = (int)must(CALL(fcntl, report, F_DUPFD_CLOEXEC, HIGH));
    for (int index = 0; index < count; index++)
        sources[index] = (int)must(CALL(fcntl, sources[index], F_DUPFD_CLOEXEC, HIGH));
    for (int index = 0; index < count; index++)
        must(CALL(dup3, sources[index], index, 0));
    for (int index = count; index < 3; index++)
        CALL(close, index);
    CALL(umask, 022);
    const char *folder = text();
    doing("working folder", folder);
    must(CALL(chdir, folder));
    doing("limits", "");
    bound_rights(word());
    set_limits();
    const char *user = word() ? text() : 0;
    size_t size, variables;
    const char *rules = bytes(&size);
    const char **argv = texts(0, 0), **env = texts(3, &variables);
    doing("start", "");
    if (user)
        become_account(user, uid, env, variables, has_terminal);
    must(CALL(prctl, PR_SET_SECUREBITS, 0, 0, 0, 0));
    install_filter(rules, size);
    if (!argv[0])
        fail(FAILED, EBADMSG);
    doing(argv[0], "");
    long last = -ENOENT, trouble = 0;
    for (size_t folders = read_count(); folders--;) {
        last = execute_in(text(), argv, env);
        if (!trouble && last != -ENOENT && last != -ENOTDIR)
            trouble = last;
    }
    must(trouble ? trouble : last);
}

static void spawn(void) {
    int sources[MAX_FILES + 3], count = 0, controlling = -1, pipe[2];
    unsigned uid = join();
    wait_for_go();
    uint64_t most = word();
    int has_terminal = (int)word();
    unsigned rows = (unsigned)word(), columns = (unsigned)word();
    if (has_terminal)
        for (int terminal = open_terminal(&controlling, rows, columns); count < 3;)
            sources[count++] = terminal;
    for (int index = 2; index < count_of_files; index++)
        sources[count++] = files[index];
    must(CALL(pipe2, pipe, O_CLOEXEC));
    long process = fork_within_limit(most);
    if (process == 0) {
        char word;
        CALL(close, pipe[1]);
        /* Wait until the parent has reported this process. If the parent was killed before, reply KILLED, or the
           supervisor would take the end of this process for the program's exit. */
        if (CALL(read, pipe[0], &word, 1) != 1)
            fail(KILLED, 0);
        execute(uid, sources, count, has_terminal);
    }
    /* Never wait for the child: sandboxed processes can stop it. */
    must(reply(STARTED, process, controlling));
    CALL(write, pipe[1], "", 1);
    end(0);
}

/* Stop. */

enum { STOP_S = 5 }; /* sandboxed processes can stop the process that calls kill(-1) */

/* Send SIGSTOP to all processes except the first in one step, so that none can fork meanwhile. kill(-1) must be called
   in the PID namespace, by a process that sandboxed processes can stop or kill; the reply says whether it succeeded. */
static void stop(void) {
    int pipe[2];
    join();
    doing("stop", "");
    must(CALL(pipe2, pipe, O_CLOEXEC));
    long process = must(CALL(clone, SIGCHLD, 0, 0, 0, 0));
    if (process == 0) {
        unless(ESRCH, CALL(kill, -1, SIGSTOP));
        CALL(write, pipe[1], "", 1);
        end(0);
    }
    struct polled polled = {pipe[0], POLLIN, 0};
    struct moment patience = {STOP_S, 0};
    char word;
    CALL(close, pipe[1]);
    int stopped = CALL(ppoll, &polled, 1, &patience, 0, 8) > 0 && CALL(read, pipe[0], &word, 1) == 1;
    CALL(kill, process, SIGKILL);
    must(reply(DONE, stopped, -1));
    end(0);
}

/* Listen. */

enum { BACKLOG = 128 }; /* connections that wait while the egress process is busy or restarted */

/* Reply with a listening socket, which stays in the sandbox's network namespace in any process that gets it. */
static void listen_inside(void) {
    struct address address = {AF_INET, {0}, {127, 0, 0, 1}, {0}};
    join();
    unsigned port = (unsigned)word();
    address.port[0] = (unsigned char)(port >> 8);
    address.port[1] = (unsigned char)port;
    doing("port of the proxy", "");
    long opened = must(CALL(socket, AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    int on = 1;  /* connections of an earlier socket at this port may be in TIME_WAIT */
    must(CALL(setsockopt, opened, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on));
    must(CALL(bind, opened, &address, sizeof address));
    must(CALL(listen, opened, BACKLOG));
    must(reply(DONE, 0, (int)opened));
    end(0);
}

#include "files.c"

/* Make: mounts. */

enum { CLONED = OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC, WHOLE = CLONED | AT_RECURSIVE };

/* Return a detached copy of a mount. */
static int clone_mount(const char *path, unsigned flags) {
    doing("mount of", path);
    return (int)must(CALL(open_tree, AT_FDCWD, path, flags));
}

static void restrict_mount(int tree, uint64_t attributes, unsigned flags) {
    struct mount_attr given = {attributes, 0, 0, 0};
    must(CALL(mount_setattr, tree, "", AT_EMPTY_PATH | flags, &given, sizeof given));
}

/* Attach a detached mount at the descriptor of a mount point, and close both descriptors. */
static void attach(int tree, long target) {
    must(target);
    must(CALL(move_mount, tree, "", target, "", MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH));
    CALL(close, tree);
    CALL(close, target);
}

static int is_folder(long file) {
    return S_ISDIR(stat_of(file).stx_mode);
}

/* Make the folder at the first "size" bytes of a path, and its parents. */
static void make_folder(const char *path, size_t size) {
    char above[MAX_PATH];
    doing("folder", path);
    if (size >= sizeof above)
        fail(FAILED, ENAMETOOLONG);
    for (size_t index = 1; index <= size; index++)
        if (index == size || path[index] == '/') {
            memcpy(above, path, index);
            above[index] = 0;
            unless(EEXIST, CALL(mkdirat, AT_FDCWD, above, 0755));
        }
}

static size_t length_above(const char *path) {
    size_t size = length(path);
    while (size && path[size] != '/')
        size--;
    return size;
}

/* Attach a detached mount at a path, which is created as a folder or a file, like the mount's root. */
static void mount_visible(int tree, const char *target) {
    if (is_folder(tree)) {
        make_folder(target, length(target));
    } else {
        make_folder(target, length_above(target));
        /* An existing file of any type is not changed, since the mount covers it. */
        int flags = O_WRONLY | O_CREAT | O_NONBLOCK | O_NOCTTY | O_CLOEXEC;
        long made = CALL(openat, AT_FDCWD, target, flags, 0644);
        if (!is_error(made))
            CALL(close, made);
    }
    doing("mount on", target);
    attach(tree, open_inside(target, O_PATH));
}

static void mount_on(const char *target, const char *source, const char *kind, unsigned long flags, const char *data) {
    make_folder(target, length(target));
    doing("mount on", target);
    must(CALL(mount, source, target, kind, flags, data));
}

/* Return a detached mount of a new kernel file system, such as proc, for this process's namespaces. */
static int new_kernel_mount(const char *kind, unsigned attributes) {
    doing("mount of", kind);
    long made = must(CALL(fsopen, kind, FSOPEN_CLOEXEC));
    must(CALL(fsconfig, made, FSCONFIG_CMD_CREATE, 0, 0, 0));
    attributes |= MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC;
    int tree = (int)must(CALL(fsmount, made, FSMOUNT_CLOEXEC, attributes));
    CALL(close, made);
    return tree;
}

/* Open a mount point, which is created if missing, and must not be a symlink. */
static long own_folder(const char *path) {
    make_folder(path, length(path));
    doing(path, "of the image, which must be a folder and no link");
    return must(open_inside(path, O_PATH | O_DIRECTORY | O_NOFOLLOW));
}

/* Make: files. */

static void write_to(long file, const char *content, size_t size) {
    must(CALL(write, file, content, size));
    CALL(close, file);
}

/* Open a kernel setting, given a descriptor of the kernel's /proc: the image may have other files at /proc. */
static long setting(int proc, const char *name) {
    doing("", name);
    return CALL(openat, proc, name, O_WRONLY | O_CLOEXEC, 0);
}

/* Write the sandbox's own files of /etc, replacing the image's. */
static void write_files(void) {
    make_folder("/etc", 4);
    for (size_t count = read_count(), size; count--;) {
        const char *path = text(), *content = bytes(&size);
        doing("", path);
        /* Remove a symlink instead of following it. */
        unless(ENOENT, CALL(unlinkat, AT_FDCWD, path, 0));
        int flags = O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC;
        write_to(must(CALL(openat, AT_FDCWD, path, flags, 0666)), content, size);
    }
}

/* Add a line for the sandbox's user or group to each account file that lacks the id, unless an earlier file has the id.
   A file that is not writable or not regular is skipped. */
static void add_account(void) {
    struct field fields[FIELDS];
    int known = 0;
    for (size_t tables = read_count(); tables--;) {
        const char *path = text(), *line = text();
        long number = (long)word();
        struct table table = table_of(path);
        int whole = table.at == table.end || table.end[-1] == '\n';
        for (int count; (count = line_of(&table, fields, ':'));)
            known |= count > 3 && number_of(fields[2]) == number;
        int flags = O_WRONLY | O_CREAT | O_APPEND | O_NONBLOCK | O_NOCTTY | O_CLOEXEC;
        long opened = known ? -EEXIST : CALL(openat, AT_FDCWD, path, flags, 0666);
        if (is_error(opened))
            continue;
        if (S_ISREG(stat_of(opened).stx_mode)) {
            /* The file's last line may lack its line end. */
            if (!whole)
                CALL(write, opened, "\n", 1);
            CALL(write, opened, line, length(line));
        }
        CALL(close, opened);
    }
}

/* Write the kernel settings and files that every sandbox has of its own. */
static void write_settings(int proc) {
    /* Forbid user namespaces, in which a sandboxed process would have all capabilities. */
    write_to(must(setting(proc, "sys/user/max_user_namespaces")), "0", 1);
    write_files();
    add_account();
}

/* Make folders that every sandbox has. With several users, all users may write to the sticky folders, even if the image
   was built without root and so with other modes. */
static void make_standard_folders(int many_users) {
    static const struct { const char *path; unsigned mode; } USUAL[] = {
        {"/tmp", 01777}, {"/var/tmp", 01777}, {"/root", 0700}};
    for (size_t index = 0; index < sizeof USUAL / sizeof *USUAL; index++) {
        const char *path = USUAL[index].path;
        unsigned mode = USUAL[index].mode;
        make_folder(path, length_above(path));
        doing("", path);
        if (unless(EEXIST, CALL(mkdirat, AT_FDCWD, path, 0755)) == 0)
            must(CALL(fchmodat, AT_FDCWD, path, mode));
        long found = many_users && mode & S_ISVTX ? open_inside(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW) : -ENOENT;
        if (!is_error(found)) {
            must(CALL(fchmod, found, mode));
            CALL(close, found);
        }
    }
}

/* Make: devices and kernel file systems. */

static const char *const DEVICES[] = {
    "/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty"};

static const char *const LINKS[][2] = {
    {"/dev/ptmx", "pts/ptmx"},           {"/dev/fd", "/proc/self/fd"},         {"/dev/stdin", "/proc/self/fd/0"},
    {"/dev/stdout", "/proc/self/fd/1"}, {"/dev/stderr", "/proc/self/fd/2"}, {"/dev/core", "/proc/kcore"}};

/* Files that reveal more of the machine than programs need; container runtimes hide the same files. */
static const char *const HIDDEN[] = {
    "/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/key-users",
    "/proc/latency_stats", "/proc/timer_list", "/proc/timer_stats", "/proc/sched_debug", "/proc/scsi",
    "/proc/kpagecgroup", "/proc/kpagecount", "/proc/kpageflags", "/proc/kallsyms",
    "/sys/firmware", "/sys/devices/virtual/powercap"};

static const char *const READ_ONLY[] = {"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"};

enum {
    COUNT_OF_DEVICES = sizeof DEVICES / sizeof *DEVICES,
    COUNT_OF_LINKS = sizeof LINKS / sizeof *LINKS,
    COUNT_OF_HIDDEN = sizeof HIDDEN / sizeof *HIDDEN,
    COUNT_OF_READ_ONLY = sizeof READ_ONLY / sizeof *READ_ONLY,
};

static void fill_dev(const int *devices) {
    CALL(close, own_folder("/dev"));
    mount_on("/dev", "tmpfs", "tmpfs", MS_NOSUID | MS_NOEXEC, text());
    for (int index = 0; index < COUNT_OF_DEVICES; index++)
        mount_visible(devices[index], DEVICES[index]);
    for (int index = 0; index < COUNT_OF_LINKS; index++) {
        doing("", LINKS[index][0]);
        must(CALL(symlinkat, LINKS[index][1], AT_FDCWD, LINKS[index][0]));
    }
    mount_on("/dev/pts", "devpts", "devpts", MS_NOSUID | MS_NOEXEC, text());
    mount_on("/dev/shm", "shm", "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, text());
    mount_on("/dev/mqueue", "mqueue", "mqueue", MS_NOSUID | MS_NODEV | MS_NOEXEC, 0);
}

static void protect_kernel_settings(void) {
    for (int index = 0; index < COUNT_OF_READ_ONLY; index++) {
        doing("", READ_ONLY[index]);
        long tree = unless(ENOENT, CALL(open_tree, AT_FDCWD, READ_ONLY[index], CLONED));
        if (tree == -ENOENT)
            continue;
        restrict_mount((int)tree, MOUNT_ATTR_RDONLY, 0);
        attach((int)tree, open_inside(READ_ONLY[index], O_PATH));
    }
}

/* Mount /sys and /proc, then hide and protect parts of them. Before this step no path leads to the magic links of
   /proc; after this step no path of the image is looked up. */
static void mount_kernel_filesystems(int proc, int sys) {
    long empty = -1, folder = own_folder("/sys");
    attach(sys, folder);
    folder = own_folder("/proc");
    attach(proc, folder);
    for (int index = 0; index < COUNT_OF_HIDDEN; index++) {
        const char *path = HIDDEN[index];
        long found = open_inside(path, O_PATH);
        doing("", path);
        if (unless(ENOENT, found) == -ENOENT)
            continue;
        if (!is_folder(found)) {
            attach(clone_mount("/dev/null", CLONED), found);
        } else if (empty < 0) {
            /* Hide every folder behind one empty folder. */
            must(CALL(mount, "none", path, "tmpfs", MS_RDONLY, "size=4k,nr_inodes=2,mode=755"));
            empty = must(open_inside(path, O_PATH));
            CALL(close, found);
        } else {
            attach((int)must(CALL(open_tree, empty, "", CLONED | AT_EMPTY_PATH)), found);
        }
    }
    protect_kernel_settings();
}

/* Make: the first process. */

/* Wait for the supervisor's message, which for machine root carries the image as a mount; return its descriptor or -1.
   Exit if the socket closes: the supervisor has died or cancelled the start. */
static int wait_for_image(int channel) {
    struct { struct control head; int file, padding; } rights = {{0, 0, 0}, -1, 0};
    char go[16];
    struct vector vector = {go, sizeof go};
    struct message message = {0, 0, &vector, 1, &rights, sizeof rights, 0};
    if (CALL(recvmsg, channel, &message, MSG_CMSG_CLOEXEC) <= 0)
        end(127);
    return rights.file;
}

static void raise_loopback(void) {
    struct interface loopback = {"lo", IFF_UP, {0}};
    doing("loopback device", "");
    long device = must(CALL(socket, AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    must(CALL(ioctl, device, SIOCSIFFLAGS, &loopback));
    CALL(close, device);
}

/*
 * The root file system: an overlay of the image and the sandbox's layer, devices and binds. The image is untrusted, and
 * its symlinks are followed as sandboxed processes would follow them. So binds are cloned first, and the host's root is
 * unmounted with no open file that leads back, before the first path of the image is looked up. The overlay's options
 * are relative to the sandbox's folder, since sandboxed processes see them in /proc/self/mountinfo.
 */
static void change_root(int image, const int *devices, int many_users, size_t first_bind_file) {
    const char *folder = text(), *lower = text();
    size_t binds = read_count();
    struct { int tree; const char *target; } *held = allocate((binds + 1) * sizeof *held);
    for (size_t index = 0; index < binds; index++) {
        uint64_t attributes = word();
        held[index].tree = clone_mount(text(), WHOLE);
        restrict_mount(held[index].tree, attributes, AT_RECURSIVE);
        held[index].target = text();
    }
    doing("its folder", "");
    must(CALL(chdir, folder));
    must(CALL(mkdirat, AT_FDCWD, "image", 0700));
    must(CALL(mkdirat, AT_FDCWD, "root", 0700));
    if (image < 0)
        image = clone_mount(lower, CLONED);
    doing("mount on", "image");
    attach(image, CALL(openat, AT_FDCWD, "image", O_PATH | O_CLOEXEC, 0));
    /* volatile: the layer is removed with the sandbox, so programs need not wait for syncs to the disk. */
    doing("mount of an overlay on", "root");
    must(CALL(mount, "overlay", "root", "overlay", 0,
              "lowerdir=image,upperdir=overlay/upper,workdir=overlay/work,userxattr,volatile"));
    must(CALL(chdir, "root"));
    doing("pivot_root", "");
    must(CALL(pivot_root, ".", "."));
    /* pivot_root(".", ".") mounts the host's root on top of the new root, so "." is the host's root. */
    doing("unmount of the host", "");
    must(CALL(umount2, ".", MNT_DETACH));
    must(CALL(chdir, "/"));
    fill_dev(devices);
    for (size_t index = 0; index < binds; index++)
        mount_visible(held[index].tree, held[index].target);
    for (size_t count = read_count(), index = 0; index < count; index++)
        mount_visible(file((int)(first_bind_file + index)), text());
    make_standard_folders(many_users);
}

static void first_process(int channel, int program) {
    unsigned uid = (unsigned)word(), gid = (unsigned)word();
    int host_network = (int)word(), many_users = (int)word(), machine_root = (int)word(), devices[COUNT_OF_DEVICES];
    report = channel;
    doing("start", "");
    must(CALL(prctl, PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0));
    int image = wait_for_image(channel);
    must(CALL(setsid));
    CALL(umask, 022);
    become_user(uid, gid);
    doing("mounts of its own", "");
    must(CALL(mount, "none", "/", 0, MS_REC | MS_PRIVATE, 0));
    for (int index = 0; index < COUNT_OF_DEVICES; index++) {
        devices[index] = clone_mount(DEVICES[index], CLONED);
        /* A read-only mount allows writing to the device, but protects its mode and owner on the host. */
        if (machine_root)
            restrict_mount(devices[index], MOUNT_ATTR_RDONLY, 0);
    }
    /* The kernel allows new mounts of proc and sysfs only while the host's are visible. */
    int proc = new_kernel_mount("proc", 0);
    int sys = host_network ? clone_mount("/sys", WHOLE) : new_kernel_mount("sysfs", MOUNT_ATTR_RDONLY);
    if (host_network)
        restrict_mount(sys, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID, AT_RECURSIVE);
    change_root(image, devices, many_users, 4);
    const char *name = text();
    doing("host name", "");
    must(CALL(sethostname, name, length(name)));
    if (!host_network)
        raise_loopback();
    write_settings(proc);
    mount_kernel_filesystems(proc, sys);
    size_t size;
    const char *rules = bytes(&size);
    doing("rights", "");
    must(CALL(prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
    keep_rights(0);
    install_filter(rules, size);
    /* With SIGCHLD ignored, also after exec, the kernel reaps orphans. */
    ignore(SIGCHLD);
    /* Descriptors 0 to 2 of the host are not closed on exec. */
    for (int index = 0; index < 3; index++)
        CALL(close, index);
    doing("idle program", "");
    must(reply(READY, 0, -1));
    const char *const arguments[] = {"sandbox", 0}, *const variables[] = {0};
    must(CALL(execveat, program, "", arguments, variables, AT_EMPTY_PATH));
}

/* Join a parent namespace as its root, who may create and map user namespaces below. */
static void join_parent(int parent) {
    doing("parent namespace", "");
    must(CALL(setns, parent, CLONE_NEWUSER));
    must(CALL(setresgid, 0, 0, 0));
    must(CALL(setresuid, 0, 0, 0));
}

/* Make: start the first process of a sandbox, and reply with its pid. Descriptors after the reply socket: the parent
   namespace, the channel of the first process, this executable, and binds or a mount namespace without overmounts. */
static void make(void) {
    char path[64];
    int parent = file(1), channel = file(2), program = file(3);
    doing("mount namespace without overmounts", "");
    if (word())
        must(CALL(setns, file(4), CLONE_NEWNS));
    join_parent(parent);
    /* Changing ids has cleared the dumpable flag; the host's root would then own the id map files in /proc. */
    must(CALL(prctl, PR_SET_DUMPABLE, 1, 0, 0, 0));
    doing("limits", "");
    set_limits();
    const char *uids = text(), *gids = text();
    uint64_t spaces = word();
    doing("namespaces", "");
    long process = must(CALL(clone, spaces | CLONE_PARENT | SIGCHLD, 0, 0, 0, 0));
    if (process == 0) {
        CALL(close, report);
        CALL(close, parent);
        first_process(channel, program);
    }
    doing("users", "");
    write_to(open_own(proc_path(path, (unsigned long)process, "/uid_map"), O_WRONLY), uids, length(uids));
    doing("groups", "");
    write_to(open_own(proc_path(path, (unsigned long)process, "/gid_map"), O_WRONLY), gids, length(gids));
    must(reply(STARTED, process, -1));
    end(0);
}

/*
 * Prepare: adjust a sandbox that the container runtime started to match a direct start. The runtime leaves tmpfs mounts
 * without limits, allows user namespaces, and shows the host's accounts, hosts, nameservers, time zone, network devices
 * and control groups.
 */

/* As must, but ignore a refused remount: some machines allow none, and a bind of a host's tmpfs has its own limit. */
static void if_allowed(long result) {
    if (result != -EPERM && result != -EACCES)
        must(result);
}

/* Decode a path of /proc/PID/mounts, where blanks are a backslash and three octal digits; return its length. */
static size_t unescape(char *target, struct field name) {
    size_t size = 0;
    for (size_t index = 0; index < name.size; index++) {
        const char *each = name.text + index;
        if (*each == '\\' && name.size - index > 3) {
            target[size++] = (char)((each[1] - '0') << 6 | (each[2] - '0') << 3 | (each[3] - '0'));
            index += 3;
        } else {
            target[size++] = *each;
        }
    }
    return size;
}

static void bound_memory(const char *small, const char *shared, const char *terminals) {
    struct field fields[FIELDS];
    /* /proc/self leads nowhere: this process is not in the PID namespace of the sandbox's /proc. */
    struct table mounts = table_of("/proc/1/mounts");
    for (int count; (count = line_of(&mounts, fields, ' '));) {
        char target[MAX_PATH];
        if (count < 3 || fields[1].size >= sizeof target)
            continue;
        target[unescape(target, fields[1])] = 0;
        doing("bounds of", target);
        int terminal = is_text(fields[2], "devpts");
        const char *kind = terminal ? "devpts" : "tmpfs", *data = terminal ? terminals : small;
        if (same(target, "/dev/shm", sizeof "/dev/shm"))
            data = shared;
        unsigned long flags = terminal ? MS_NOSUID | MS_NOEXEC : 0;
        if (is_text(fields[2], kind) && (terminal || !same(target, "/sys", 4)))
            if_allowed(CALL(mount, kind, target, kind, MS_REMOUNT | flags, data));
    }
}

/* Prepare. The descriptor after the reply socket and the /proc folder is a file for the variables of the first process.
   That process chooses which part of its memory is read as its variables, and could block the read forever, so a timer
   kills this process. */
static void prepare(void) {
    static const char *const KERNELS[] = {"/proc", "/sys", "/dev"};
    struct { struct { long seconds, microseconds; } again, first; } timer = {{0, 0}, {0, 0}};
    struct statx found;
    struct { long kind, rest[14]; } system;
    long reading, writing, proc = -1;
    join();
    timer.first.seconds = (long)word();
    must(CALL(setitimer, 0, &timer, 0));
    CALL(umask, 022);
    for (size_t index = 0; index < sizeof KERNELS / sizeof *KERNELS; index++) {
        const char *path = KERNELS[index];
        doing(path, "");
        memset(&found, 0, sizeof found);
        must(CALL(statx, AT_FDCWD, path, AT_SYMLINK_NOFOLLOW, STATX_TYPE, &found));
        /* If an image's symlink redirected the runtime's mount, /proc, /sys or /dev may not be the kernel's. */
        if (!S_ISDIR(found.stx_mode))
            refuse(path, "of the image is not a folder", ENOTDIR);
    }
    doing("its variables", "");
    proc = must(open_inside("/proc", O_PATH | O_DIRECTORY | O_NOFOLLOW));
    /* The image's shell runs already, and may have changed its root, which this process has joined. */
    must(CALL(fstatfs, proc, &system));
    if (system.kind != PROC_SUPER_MAGIC || stat_of(proc).stx_ino != PROC_ROOT_INODE)
        refuse("/proc", "of the image is not the kernel's", ENOTDIR);
    uint64_t most = word();
    if (!copy(must(open_in(proc, "1/environ", O_RDONLY)), file(2), most, &reading, &writing))
        refuse("the image sets more than 2 MiB of variables", "", E2BIG);
    must(reading);
    must(writing);
    const char *small = text(), *shared = text(), *terminals = text();
    bound_memory(small, shared, terminals);
    doing("mount on", "/sys");
    if_allowed(CALL(mount, "sysfs", "/sys", "sysfs", MS_RDONLY, 0));
    /* Unmount files of the host, which the runtime's configuration may have left out. */
    for (size_t count = read_count(); count--;)
        CALL(umount2, text(), MNT_DETACH | UMOUNT_NOFOLLOW);
    /* Remove files of the host that the runtime has copied. */
    for (size_t count = read_count(); count--;)
        CALL(unlinkat, AT_FDCWD, text(), 0);
    /* If the sandbox's root is the machine's root user, replace the runtime's read-only binds by this program's. */
    int machine_root = (int)word();
    if (machine_root)
        CALL(umount2, "/proc/sys", MNT_DETACH | UMOUNT_NOFOLLOW);
    write_settings((int)proc);
    if (machine_root) {
        struct mount_attr locked = {MOUNT_ATTR_RDONLY, 0, 0, 0};
        for (int index = 0; index < COUNT_OF_DEVICES; index++)
            CALL(mount_setattr, AT_FDCWD, DEVICES[index], 0, &locked, sizeof locked);
        protect_kernel_settings();
    }
    must(reply(DONE, 0, -1));
    end(0);
}

/* The launcher's loop, and the program's entry. */

enum { MAKE = 1, SPAWN, PUT, GET, ERASE, PREPARE, STOP, LISTEN };

struct header { uint32_t kind, grouped; uint64_t size; };

/* In the child: handle a request. A request that is too large for a packet is in a memfd, the last descriptor. */
static void handle_request(struct header header, size_t size) {
    report = files[0];
    /* Close the launcher's socket, by which the supervisor notices the launcher's death: a child that is stopped
       forever in a sandbox would keep the socket open. */
    must(CALL(close, CHANNEL));
    /* A spawn joins the sandbox before it waits for GO, to save time. */
    if (header.kind != SPAWN)
        wait_for_go();
    if (header.size != size) {
        int held = file(count_of_files - 1);
        if (stat_of(held).stx_size < header.size)
            fail(FAILED, EBADMSG);
        at = (const char *)must(CALL(mmap, 0, header.size, PROT_READ, MAP_PRIVATE, held, 0));
        limit = at + header.size;
        CALL(close, held);
        count_of_files--;
    }
    static void (*const KINDS[])(void) = {
        [MAKE] = make, [SPAWN] = spawn, [PUT] = put, [GET] = get, [ERASE] = erase_sandbox, [PREPARE] = prepare,
        [STOP] = stop, [LISTEN] = listen_inside,
    };
    if (header.kind < sizeof KINDS / sizeof *KINDS && KINDS[header.kind])
        KINDS[header.kind]();
    fail(FAILED, EBADMSG);
}

static void serve(void) {
    report = -1;
    doing("start", "");
    static union { struct control head; char room[sizeof(struct control) + MAX_FILES * sizeof(int)]; } rights;
    must(CALL(prctl, PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0));
    must(CALL(prctl, PR_SET_DUMPABLE, 0, 0, 0, 0));
    CALL(close_range, CHANNEL + 1, ~0U, 0);
    /* Programs inherit ignored and blocked signals, for example from nohup, so reset all signals. */
    unsigned long usual[4] = {0, 0, 0, 0};
    for (int number = 1; number <= LAST_SIGNAL; number++)
        CALL(rt_sigaction, number, usual, 0, 8);
    must(CALL(rt_sigprocmask, SIG_SETMASK, usual, 0, 8));
    for (;;) {
        struct header header;
        struct vector vector = {packet, sizeof packet};
        struct message message = {0, 0, &vector, 1, &rights, sizeof rights, 0};
        long size = CALL(recvmsg, CHANNEL, &message, MSG_CMSG_CLOEXEC);
        if (size <= 0)
            end(size ? 127 : 0);
        count_of_files = 0;
        if (message.room >= sizeof rights.head && rights.head.level == SOL_SOCKET && rights.head.kind == SCM_RIGHTS)
            count_of_files = (int)((rights.head.length - sizeof rights.head) / sizeof(int));
        memcpy(files, rights.room + sizeof rights.head, (size_t)count_of_files * sizeof(int));
        memcpy(&header, packet, sizeof header);
        int64_t process = -EBADMSG;
        if (message.flags & MSG_CTRUNC)
            process = -EMFILE;
        else if (!(message.flags & MSG_TRUNC) && (size_t)size >= sizeof header
                 && count_of_files > (header.grouped ? 1 : 0)) {
            struct clone_args how = {.flags = CLONE_PARENT | CLONE_INTO_CGROUP, .cgroup = (uint64_t)files[0]};
            process = header.grouped ? CALL(clone3, &how, sizeof how) : fork_sibling();
            if (process == 0) {
                if (header.grouped) {
                    CALL(close, files[0]);
                    count_of_files--;
                    for (int index = 0; index < count_of_files; index++)
                        files[index] = files[index + 1];
                }
                at = packet + sizeof header;
                limit = packet + size;
                must(CALL(prctl, PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0));
                handle_request(header, (size_t)size - sizeof header);
            }
        }
        for (int index = 0; index < count_of_files; index++)
            CALL(close, files[index]);
        CALL(sendto, CHANNEL, &process, sizeof process, MSG_NOSIGNAL, 0, 0);
    }
}

/* Arguments: "eraser", a folder, and the descriptor of a parent namespace if its user ids own files in the folder. */
static void run_eraser(const char **arguments) {
    report = -1;
    doing("start", "");
    if (!arguments[1])
        fail(FAILED, EBADMSG);
    if (arguments[2])
        join_parent((int)number_of((struct field){arguments[2], length(arguments[2])}));
    erase(arguments[1]);
    end(0);
}

void begin(const char **arguments) __attribute__((noreturn));
void begin(const char **arguments) {
    struct field role = {"", 0};
    if (arguments[0])
        role = (struct field){arguments[0], length(arguments[0])};
    if (is_text(role, "sandbox"))
        for (;;)
            CALL(ppoll, 0, 0, 0, 0, 0);
    if (is_text(role, "eraser"))
        run_eraser(arguments);
    serve();
    end(0);
}
