// SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
// SPDX-License-Identifier: Apache-2.0
/*
 * The one program of ours that is ever inside a sandbox, and what starts everything there.
 *
 * As "launcher" it waits on an open socket for requests of the supervisor, and forks a child for each, which is the
 * supervisor's own (CLONE_PARENT) and born in the sandbox's control group. That child does one thing, and ends:
 *
 *   make     start the first process of a new sandbox, in namespaces of its own, which makes the sandbox from inside
 *   spawn    join a sandbox, start a process there, and become the program that is asked for
 *   prepare  join what the container runtime has started, and make it as others are
 *   put, get join a sandbox, and copy a file in or out
 *   stop     join a sandbox, and stop all that runs in it
 *   erase    remove what an ended sandbox left
 *
 * As "sandbox" it is the first process of a sandbox for the rest of its life: it waits, and does nothing else. As
 * "eraser" it removes a folder for anybody.
 *
 * There is no C library in it, no memory that is allocated but in whole mappings, and no thread. A request is words of
 * eight bytes and texts that end with a zero, in the order in which they are read here, with descriptors beside it;
 * requests.py writes them. Whoever wrote a request is trusted, what is found inside a sandbox is not: names
 * are looked up in its own root, nothing of it is waited for, and what joins can't be traced from the moment it does.
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

/* Structures of the kernel's for which there is no header without a C library. */
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

enum { SOL_SOCKET = 1, SCM_RIGHTS = 1 };
enum { MSG_CTRUNC = 8, MSG_TRUNC = 0x20, MSG_NOSIGNAL = 0x4000, MSG_CMSG_CLOEXEC = 0x40000000 };
enum { AF_INET = 2 };
enum { SOCK_DGRAM = 2, SOCK_CLOEXEC = 02000000 };
enum { PROT_READ = 1, PROT_WRITE = 2, MAP_PRIVATE = 2, MAP_ANONYMOUS = 0x20, POLLIN = 1, RLIMIT_NPROC = 6 };
enum { MNT_DETACH = 2, UMOUNT_NOFOLLOW = 8, PROC_SUPER_MAGIC = 0x9fa0, PROC_ROOT_INODE = 1 };
enum { SIOCSIFFLAGS = 0x8914, IFF_UP = 1 };

/* The architecture: a system call, and the first instructions. */

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

/* What a compiler may call by itself. */

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

/* Answers: what was done, or which step failed. */

enum { STARTED = 1, READY, DONE, FAILED, LOST, EXHAUSTED, KILLED, NO_USER, OTHER_USER };

enum { CHANNEL = 3, MOST_FILES = 64, HIGH = 128, WORDS = 4096, LONGEST_PATH = 4096 };

static struct answer { int32_t kind, number; char words[WORDS]; } answer;
static int report;             /* where this process answers; less than 0 if only its end does, by the error */
static int has_word;           /* whether the supervisor has had us go on */
static const char *step, *of; /* what it is at, in words */
static int joining;            /* whether a failure is but the sandbox's end, which nothing depends on */

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

/* Say what became of it; a file may go with it. Nobody who is told waits for more than our end. */
static long tell(int kind, long number, int file) {
    size_t size = 0;
    const char *parts[] = {step, *of ? " " : "", of};
    for (int part = 0; part < 3; part++)
        for (const char *at = parts[part]; *at && size < WORDS; at++)
            answer.words[size++] = *at;
    answer.kind = kind;
    answer.number = (int32_t)number;
    return send_message(report, &answer, offsetof(struct answer, words) + size, file);
}

/* The supervisor says so once it knows of us. If our launcher was killed before it could tell, another does it. */
static void wait_for_word(void) {
    char word;
    if (CALL(read, report, &word, 1) != 1)
        end(127);
    has_word = 1;
}

static void fail(int kind, long number) __attribute__((noreturn));
static void fail(int kind, long number) {
    if (report < 0)
        end((int)number);
    /* Unread, it would take what we say with it. */
    if (!has_word)
        wait_for_word();
    tell(kind, number, -1);
    end(127);
}

static int is_error(long result) {
    return result < 0 && result > -4096;
}

/* The result of a call that has to succeed. */
static long must(long result) {
    if (is_error(result))
        fail(joining && result != -EAGAIN ? LOST : FAILED, -result);
    return result;
}

/* The same, but for one error, which is returned. */
static long unless(long error, long result) {
    return result == -error ? result : must(result);
}

static void doing(const char *what, const char *whose) {
    step = what;
    of = whose;
}

/* Requests: read in order, and never past their end. */

static char packet[1 << 16];
static const char *at, *limit;
static int files[MOST_FILES], count_of_files;

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

/* How many follow, each of which takes a byte or more. */
static size_t several(void) {
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

static void *room(size_t size) {
    return (void *)must(CALL(mmap, 0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
}

/* Texts as a program is given them, with room for more. */
static const char **texts(size_t more, size_t *count) {
    size_t found = several();
    const char **all = room((found + more + 1) * sizeof *all);
    for (size_t index = 0; index < found; index++)
        all[index] = text();
    if (count)
        *count = found;
    return all;
}

/* Small things. */

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

/* "/proc/", a number, and the rest, which is short. */
static const char *of_process(char *target, unsigned long process, const char *rest) {
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
    for (size_t count = several(); count--;) {
        int which = (int)word();
        uint64_t soft = word();
        set_limit(which, soft, word());
    }
}

static void become_user(unsigned uid, unsigned gid) {
    /* Refused in namespaces of ordinary users, whose groups mean nothing inside. */
    unless(EPERM, CALL(setgroups, 0, 0));
    /* It keeps every right that it has in there, whoever it is, until it executes something. */
    must(CALL(prctl, PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP, 0, 0, 0));
    must(CALL(setresgid, gid, gid, gid));
    must(CALL(setresuid, uid, uid, uid));
    /* Changed ids made the kernel forget it. */
    must(CALL(prctl, PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0));
}

static void install_filter(const char *rules, size_t size) {
    struct sock_fprog program = {(unsigned short)(size / sizeof(struct sock_filter)), (struct sock_filter *)rules};
    doing("filter of system calls", "");
    must(CALL(seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_SPEC_ALLOW, &program));
}

/* A file of the machine's, by a name that nobody else has a hand in. */
static int open_own(const char *path, int flags) {
    return (int)must(CALL(openat, AT_FDCWD, path, flags | O_CLOEXEC, 0));
}

static struct statx about(long file) {
    struct statx found;
    memset(&found, 0, sizeof found);
    must(CALL(statx, file, "", AT_EMPTY_PATH, STATX_BASIC_STATS, &found));
    return found;
}

/* What a name in an open folder leads to, by no link of the kernel's own to open files, and without waiting for it. */
static long open_in(long folder, const char *path, int flags) {
    flags |= O_CLOEXEC | (flags & O_PATH ? 0 : O_NONBLOCK | O_NOCTTY);
    struct open_how how = {(uint64_t)flags, 0, RESOLVE_NO_MAGICLINKS};
    long found = CALL(openat2, folder, path, &how, sizeof how);
    if (found == -ENOSYS || found == -EPERM) /* before Linux 5.6, or in a container whose filter does not know it */
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

/* Have these capabilities and no others, until something is executed. */
static void keep_rights(uint64_t kept) {
    struct __user_cap_header_struct version = {_LINUX_CAPABILITY_VERSION_3, 0};
    uint32_t low = (uint32_t)kept, high = (uint32_t)(kept >> 32);
    struct __user_cap_data_struct rights[2] = {{low, low, 0}, {high, high, 0}};
    must(CALL(capset, &version, rights));
}

/* Join. */

static const struct { const char *path; uint64_t flag; } SPACES[] = {
    {"ns/user", CLONE_NEWUSER}, /* first: it gives the right to join the others */
    {"ns/mnt", CLONE_NEWNS},
    {"ns/pid", CLONE_NEWPID},
    {"ns/ipc", CLONE_NEWIPC},
    {"ns/net", CLONE_NEWNET},
    {"ns/uts", CLONE_NEWUTS},
    {"ns/cgroup", CLONE_NEWCGROUP},
};

enum { COUNT_OF_SPACES = sizeof SPACES / sizeof *SPACES };

/* Join namespaces of a process, whose folder in /proc is open: whoever has its number by now, they are of that one. All
   are opened while there is a /proc of ours. */
static void enter(int process, uint64_t spaces) {
    int doors[COUNT_OF_SPACES];
    if (!(spaces & CLONE_NEWUSER)) /* no sandbox is without */
        fail(FAILED, EBADMSG);
    for (int index = 0; index < COUNT_OF_SPACES; index++)
        if (spaces & SPACES[index].flag)
            doors[index] = (int)must(CALL(openat, process, SPACES[index].path, O_RDONLY | O_CLOEXEC, 0));
    for (int index = 0; index < COUNT_OF_SPACES; index++)
        if (spaces & SPACES[index].flag) {
            must(CALL(setns, doors[index], SPACES[index].flag));
            CALL(close, doors[index]);
        }
}

/* Become a process in a sandbox's namespaces and root, by its own user, which is returned. What is forked then has its
   numbers. */
static unsigned join(void) {
    unsigned uid = (unsigned)word();
    uint64_t spaces = word();
    int process = file(1), rooted = (int)word();
    doing("the sandbox can't be joined", "");
    joining = 1;
    /* Before it is in there, nobody in there may trace it, read its memory or open its files. */
    must(CALL(prctl, PR_SET_DUMPABLE, 0, 0, 0, 0));
    enter(process, spaces);
    become_user(uid, uid);
    /* Changed ids make a process dumpable or not by a system setting; ours is not up to it. */
    must(CALL(prctl, PR_SET_DUMPABLE, 0, 0, 0, 0));
    if (!rooted) {
        /* Only now: a root that the runtime mounted with FUSE is open to nobody but the sandbox's user. */
        long root = must(CALL(openat, process, "root", O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0));
        must(CALL(fchdir, root));
        must(CALL(chroot, "."));
        CALL(close, root);
    }
    /* A link inside to /proc/self/fd would lead what is started here out by it. */
    CALL(close, process);
    joining = 0;
    return uid;
}

/* Spawn. */

/* A new terminal of the sandbox's own: both ends. Without echo line ends, too, are as they are written. */
static int open_terminal(int *controlling, unsigned rows, unsigned columns, int echo) {
    int unlocked = 0;
    struct window window = {(uint16_t)rows, (uint16_t)columns, 0, 0};
    struct termios mode;
    /* Whatever goes wrong with it: those inside can have it, too, as soon as it is unlocked. */
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
    if (!echo) {
        must(CALL(ioctl, terminal, TCGETS, &mode));
        mode.c_oflag &= ~(unsigned)ONLCR;
        mode.c_lflag &= ~(unsigned)(ECHO | ECHOE | ECHOK | ECHOCTL | ECHOKE);
        must(CALL(ioctl, terminal, TCSETS, &mode));
    }
    must(CALL(ioctl, terminal, TIOCSWINSZ, &window));
    return terminal;
}

static long fork_beside(void) {
    return CALL(clone, CLONE_PARENT | SIGCHLD, 0, 0, 0, 0);
}

/* Start a process, if the sandbox has room for it and for one more: nearly every program starts another. */
static long start_within(uint64_t most) {
    static const long pauses_ms[] = {5, 15, 30, 0};
    struct limit before;
    doing("start", "");
    must(CALL(prlimit64, 0, RLIMIT_NPROC, 0, &before));
    if (most) /* we are counted as long as we are here */
        set_limit(RLIMIT_NPROC, most < before.hard ? most : before.hard, before.hard);
    for (int index = 0;; index++) {
        long process = fork_beside();
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
        /* Others like us, or what has just ended, may be about to go. */
        pause_ms(pauses_ms[index]);
    }
    if (most)
        set_limit(RLIMIT_NPROC, before.soft, before.hard);
    /* That there is room without the sandbox's own limit is all that is asked. */
    if (must(fork_beside()) == 0)
        end(0);
    doing("processes", "");
    fail(EXHAUSTED, 0);
}

/* Accounts, as the image's files have them; read here, since a C library would load others of the image to do so. */

enum { LARGEST_TABLE = 1 << 24, MOST_GROUPS = 1 << 16, FIELDS = 7 };

struct table { const char *at, *end; };
struct field { const char *text; size_t size; };

/* An ordinary file of a reasonable size; nothing where there is none. */
static struct table table_of(const char *path) {
    struct table found = {"", ""};
    long opened = open_inside(path, O_RDONLY);
    if (is_error(opened))
        return found;
    /* By descriptor: who put it there may have put a pipe in its place just now. */
    if (S_ISREG(about(opened).stx_mode)) {
        char *content = room(LARGEST_TABLE);
        size_t size = 0;
        for (long done; size < LARGEST_TABLE && (done = CALL(read, opened, content + size, LARGEST_TABLE - size)) > 0;)
            size += (size_t)done;
        found.at = content;
        found.end = content + size;
    }
    CALL(close, opened);
    return found;
}

/* The fields of the next line, and how many there are; none at the end. */
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

/* A number of a field, or less than 0 if it is none; one that no id can have is told as one that no sandbox has. */
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

/* Have it told in a variable, in place of one that there may be; both places of the array may be used. */
static size_t tell_in(const char **variables, size_t count, const char *name, struct field value) {
    size_t size = length(name), found = 0;
    while (found < count && !same(variables[found], name, size))
        found++;
    char *fresh = room(size + value.size + 1);
    memcpy(fresh, name, size);
    memcpy(fresh + size, value.text, value.size);
    variables[found] = fresh;
    return found == count ? count + 1 : count;
}

/* Become somebody of a name or number, and have the variables tell so. */
static void become_account(const char *wanted, unsigned uid, const char **variables, size_t count) {
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
    uint32_t *groups = room(MOST_GROUPS * sizeof *groups);
    size_t found = 0;
    long other, unknown = own == UINT32_MAX || gid == UINT32_MAX;
    groups[found++] = (uint32_t)gid;
    table = table_of("/etc/group");
    for (int fields; (fields = line_of(&table, group, ':'));)
        if (fields == 4 && (other = number_of(group[2])) >= 0 && is_member(group[3], user[0]) && found < MOST_GROUPS) {
            groups[found++] = (uint32_t)other;
            unknown |= other == UINT32_MAX;
        }
    if (unknown || is_error(CALL(setgroups, found, groups)) || is_error(CALL(setresgid, gid, gid, gid)) ||
        is_error(CALL(setresuid, own, own, own)))
        fail(OTHER_USER, EINVAL);
    /* As in join. */
    must(CALL(prctl, PR_SET_DUMPABLE, 0, 0, 0, 0));
    static const struct field root = {"/", 1};
    count = tell_in(variables, count, "HOME=", user[5].size ? user[5] : root);
    count = tell_in(variables, count, "USER=", user[0]);
    tell_in(variables, count, "LOGNAME=", user[0]);
}

/* Nothing that this process executes will ever have more than these capabilities. */
static void bound_rights(uint64_t kept) {
    for (int number = 0; number < 64 && !is_error(CALL(prctl, PR_CAPBSET_READ, number, 0, 0, 0)); number++)
        if (!(kept >> number & 1))
            must(CALL(prctl, PR_CAPBSET_DROP, number, 0, 0, 0));
    must(CALL(prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
}

/* The program of that name in a folder, as a shell looks for it; here, as there can be as many folders as names have
   bytes. */
static long execute_in(const char *folder, const char **argv, const char **env) {
    char path[LONGEST_PATH];
    size_t above = length(folder), size = length(argv[0]) + 1;
    if (above + 1 + size > sizeof path)
        return -ENAMETOOLONG;
    memcpy(path, folder, above);
    if (above && path[above - 1] != '/')
        path[above++] = '/';
    memcpy(path + above, argv[0], size);
    return CALL(execve, path, argv, env);
}

/* The new process, in the sandbox's process numbers: become the program. Its files are the sources from 0 on. */
static void execute(unsigned uid, int *sources, int count, int has_terminal) {
    doing("start", "");
    must(CALL(setsid));
    if (has_terminal)
        must(CALL(ioctl, sources[0], TIOCSCTTY, 0));
    /* Out of the way first, since a source may have the number that another is to get. What keeps a high number closes
       with the program's start. */
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
        become_account(user, uid, env, variables);
    must(CALL(prctl, PR_SET_SECUREBITS, 0, 0, 0, 0));
    install_filter(rules, size);
    if (!argv[0])
        fail(FAILED, EBADMSG);
    doing(argv[0], "");
    long last = -ENOENT, trouble = 0;
    for (size_t folders = several(); folders--;) {
        last = execute_in(text(), argv, env);
        if (!trouble && last != -ENOENT && last != -ENOTDIR)
            trouble = last;
    }
    must(trouble ? trouble : last);
}

static void spawn(void) {
    int sources[MOST_FILES + 3], count = 0, controlling = -1, pipe[2];
    unsigned uid = join();
    wait_for_word();
    uint64_t most = word();
    int has_terminal = (int)word();
    unsigned rows = (unsigned)word(), columns = (unsigned)word();
    int echo = (int)word();
    if (has_terminal)
        for (int terminal = open_terminal(&controlling, rows, columns, echo); count < 3;)
            sources[count++] = terminal;
    for (int index = 2; index < count_of_files; index++)
        sources[count++] = files[index];
    must(CALL(pipe2, pipe, O_CLOEXEC));
    long process = start_within(most);
    if (process == 0) {
        char word;
        CALL(close, pipe[1]);
        /* It waits until it is known. Who was to say so may have been killed; unsaid, this end would be taken for that
           of the program. */
        if (CALL(read, pipe[0], &word, 1) != 1)
            fail(KILLED, 0);
        execute(uid, sources, count, has_terminal);
    }
    /* We never wait for it, as those inside can stop it. */
    must(tell(STARTED, process, controlling));
    CALL(write, pipe[1], "", 1);
    end(0);
}

/* Stop. */

enum { STOP_S = 5 };

/* Stop all that runs in there but the first process, in one step, in which none is forked: by a process in there, which
   those inside can stop or kill before it has done so. The answer is whether it has. */
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
    must(tell(DONE, stopped, -1));
    end(0);
}

#include "files.c"

/* Make: mounts. */

enum { CLONED = OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC, WHOLE = CLONED | AT_RECURSIVE };

/* A copy of a mount that is nowhere to be seen yet. */
static int detached(const char *path, unsigned flags) {
    doing("mount of", path);
    return (int)must(CALL(open_tree, AT_FDCWD, path, flags));
}

static void restrict_mount(int tree, uint64_t attributes, unsigned flags) {
    struct mount_attr given = {attributes, 0, 0, 0};
    must(CALL(mount_setattr, tree, "", AT_EMPTY_PATH | flags, &given, sizeof given));
}

/* Mount it there; both are closed. */
static void attach(int tree, long target) {
    must(target);
    must(CALL(move_mount, tree, "", target, "", MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH));
    CALL(close, tree);
    CALL(close, target);
}

static int is_folder(long file) {
    return S_ISDIR(about(file).stx_mode);
}

/* Make a folder, and those above it, of which so much of a path is. */
static void make_folder(const char *path, size_t size) {
    char above[LONGEST_PATH];
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

/* Mount it where it is to be seen, which is made if it is not there: a folder or a file, as what is to be seen. */
static void show(int tree, const char *target) {
    if (is_folder(tree)) {
        make_folder(target, length(target));
    } else {
        make_folder(target, length_above(target));
        /* What is there already, whatever it is, is only mounted on. */
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

/* One of the kernel's file systems, of this process's namespaces, that is nowhere yet. */
static int of_the_kernel(const char *kind, unsigned attributes) {
    doing("mount of", kind);
    long made = must(CALL(fsopen, kind, FSOPEN_CLOEXEC));
    must(CALL(fsconfig, made, FSCONFIG_CMD_CREATE, 0, 0, 0));
    attributes |= MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC;
    int tree = (int)must(CALL(fsmount, made, FSMOUNT_CLOEXEC, attributes));
    CALL(close, made);
    return tree;
}

/* A folder of the root that is no link, and is made if it is not there, to be mounted on. */
static long own_folder(const char *path) {
    make_folder(path, length(path));
    doing(path, "of the image, which has to be a folder of its own");
    return must(open_inside(path, O_PATH | O_DIRECTORY | O_NOFOLLOW));
}

/* Make: files. */

static void write_to(long file, const char *content, size_t size) {
    must(CALL(write, file, content, size));
    CALL(close, file);
}

/* A setting of the kernel's. That /proc is the kernel's, whatever an image has of that name. */
static long setting(int proc, const char *name) {
    doing("", name);
    return CALL(openat, proc, name, O_WRONLY | O_CLOEXEC, 0);
}

/* Files of /etc that are the sandbox's own, in place of what is there. */
static void write_files(void) {
    make_folder("/etc", 4);
    for (size_t count = several(), size; count--;) {
        const char *path = text(), *content = bytes(&size);
        doing("", path);
        /* A link in its place is none that anybody should follow. */
        unless(ENOENT, CALL(unlinkat, AT_FDCWD, path, 0));
        int flags = O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC;
        write_to(must(CALL(openat, AT_FDCWD, path, flags, 0666)), content, size);
    }
}

/* Give the sandbox's user a name: lines for tables that have none with his number, and none of the first who has. One
   that is a pipe holds up nobody: where it can't be had, he has no name, and the sandbox all else. */
static void name_user(void) {
    struct field fields[FIELDS];
    int known = 0;
    for (size_t tables = several(); tables--;) {
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
        if (S_ISREG(about(opened).stx_mode)) {
            /* The last one may be no whole one. */
            if (!whole)
                CALL(write, opened, "\n", 1);
            CALL(write, opened, line, length(line));
        }
        CALL(close, opened);
    }
}

/* What each sandbox has of its own, whoever made it. */
static void settle(int proc) {
    /* In a user namespace of its own a process would have every capability again. */
    write_to(must(setting(proc, "sys/user/max_user_namespaces")), "0", 1);
    write_files();
    name_user();
}

/* What every image has, by mode; the terminals' group may use what an ordinary user's builder left closed. */
static void make_usual_folders(int many_users) {
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

/* Make: what of Linux's there is. */

static const char *const DEVICES[] = {
    "/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty"};

static const char *const LINKS[][2] = {
    {"/dev/ptmx", "pts/ptmx"},           {"/dev/fd", "/proc/self/fd"},         {"/dev/stdin", "/proc/self/fd/0"},
    {"/dev/stdout", "/proc/self/fd/1"}, {"/dev/stderr", "/proc/self/fd/2"}, {"/dev/core", "/proc/kcore"}};

/* What tells of the machine more than a program needs, as containers customarily hide it. */
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
        show(devices[index], DEVICES[index]);
    for (int index = 0; index < COUNT_OF_LINKS; index++) {
        doing("", LINKS[index][0]);
        must(CALL(symlinkat, LINKS[index][1], AT_FDCWD, LINKS[index][0]));
    }
    mount_on("/dev/pts", "devpts", "devpts", MS_NOSUID | MS_NOEXEC, text());
    mount_on("/dev/shm", "shm", "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, text());
    mount_on("/dev/mqueue", "mqueue", "mqueue", MS_NOSUID | MS_NODEV | MS_NOEXEC, 0);
}

static void lock_kernels(void) {
    for (int index = 0; index < COUNT_OF_READ_ONLY; index++) {
        doing("", READ_ONLY[index]);
        long tree = unless(ENOENT, CALL(open_tree, AT_FDCWD, READ_ONLY[index], CLONED));
        if (tree == -ENOENT)
            continue;
        restrict_mount((int)tree, MOUNT_ATTR_RDONLY, 0);
        attach((int)tree, open_inside(READ_ONLY[index], O_PATH));
    }
}

/* Show the kernel's file systems, and hide and lock in them what a program has no business with. Until then no name
   leads to /proc, whose links to open files are no paths; no name of the image is looked up after that. */
static void show_kernels(int proc, int sys) {
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
            attach(detached("/dev/null", CLONED), found);
        } else if (empty < 0) {
            /* An empty folder in place of each folder. */
            must(CALL(mount, "none", path, "tmpfs", MS_RDONLY, "size=4k,nr_inodes=2,mode=755"));
            empty = must(open_inside(path, O_PATH));
            CALL(close, found);
        } else {
            attach((int)must(CALL(open_tree, empty, "", CLONED | AT_EMPTY_PATH)), found);
        }
    }
    lock_kernels();
}

/* Make: the first process. */

/* No word is that the supervisor has died, or has changed its mind. By root the image comes with it, as a mount. */
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
 * The root file system: an image, a layer of its own over it, and what is Linux's. The image is a stranger's, and its
 * links are followed as those inside would follow them. So that they lead nowhere else, what of the host is to be seen
 * inside is taken hold of first, and the host's root is gone, with no open file that leads back, before the first name
 * of the image is looked up. In /proc/self/mountinfo names in options are relative to the sandbox's folder; of what is
 * bound it tells which folder of its file system it is, since the kernel does.
 */
static void change_root(int image, const int *devices, int many_users, size_t first_volume) {
    const char *folder = text(), *lower = text();
    size_t binds = several();
    struct { int tree; const char *target; } *held = room((binds + 1) * sizeof *held);
    for (size_t index = 0; index < binds; index++) {
        uint64_t attributes = word();
        held[index].tree = detached(text(), WHOLE);
        restrict_mount(held[index].tree, attributes, AT_RECURSIVE);
        held[index].target = text();
    }
    doing("its folder", "");
    must(CALL(chdir, folder));
    must(CALL(mkdirat, AT_FDCWD, "image", 0700));
    must(CALL(mkdirat, AT_FDCWD, "root", 0700));
    if (image < 0)
        image = detached(lower, CLONED);
    doing("mount on", "image");
    attach(image, CALL(openat, AT_FDCWD, "image", O_PATH | O_CLOEXEC, 0));
    /* What a sandbox wrote goes with it: there is nothing to be gained by waiting for a disk. */
    doing("mount of an overlay on", "root");
    must(CALL(mount, "overlay", "root", "overlay", 0,
              "lowerdir=image,upperdir=overlay/upper,workdir=overlay/work,userxattr,volatile"));
    must(CALL(chdir, "root"));
    doing("pivot_root", "");
    must(CALL(pivot_root, ".", "."));
    /* The host's root lies on ours now, and in it we are at its top: no open file is needed to name it. */
    doing("unmount of the host", "");
    must(CALL(umount2, ".", MNT_DETACH));
    must(CALL(chdir, "/"));
    fill_dev(devices);
    for (size_t index = 0; index < binds; index++)
        show(held[index].tree, held[index].target);
    for (size_t count = several(), index = 0; index < count; index++)
        show(file((int)(first_volume + index)), text());
    make_usual_folders(many_users);
}

static void first_process(int channel, int program) {
    unsigned uid = (unsigned)word(), gid = (unsigned)word();
    int host_network = (int)word(), many_users = (int)word(), owned = (int)word(), devices[COUNT_OF_DEVICES];
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
        devices[index] = detached(DEVICES[index], CLONED);
        /* What is written to it is no matter of the mount; its mode is the host's, whose owner is who is inside then. */
        if (owned)
            restrict_mount(devices[index], MOUNT_ATTR_RDONLY, 0);
    }
    /* Only as long as the host's are still there may fresh ones be made. */
    int proc = of_the_kernel("proc", 0);
    int sys = host_network ? detached("/sys", WHOLE) : of_the_kernel("sysfs", MOUNT_ATTR_RDONLY);
    if (host_network)
        restrict_mount(sys, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID, AT_RECURSIVE);
    change_root(image, devices, many_users, 4);
    const char *name = text();
    doing("host name", "");
    must(CALL(sethostname, name, length(name)));
    if (!host_network)
        raise_loopback();
    settle(proc);
    show_kernels(proc, sys);
    size_t size;
    const char *rules = bytes(&size);
    doing("rights", "");
    must(CALL(prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
    keep_rights(0);
    install_filter(rules, size);
    /* Children that nobody waits for are reaped by the kernel then, also after it has become the idle program. */
    ignore(SIGCHLD);
    /* Those that are not closed by themselves; an ordinary user's sandbox could count them. */
    for (int index = 0; index < 3; index++)
        CALL(close, index);
    doing("idle program", "");
    must(tell(READY, 0, -1));
    const char *const arguments[] = {"sandbox", 0}, *const variables[] = {0};
    must(CALL(execveat, program, "", arguments, variables, AT_EMPTY_PATH));
}

/* Become the first user of a parent namespace, who may make user namespaces in it and map them. */
static void join_parent(int parent) {
    doing("parent namespace", "");
    must(CALL(setns, parent, CLONE_NEWUSER));
    must(CALL(setresgid, 0, 0, 0));
    must(CALL(setresuid, 0, 0, 0));
}

/* Its files: the parent namespace of its user ids, the channel of the first process, the program that this is to become, and
   volumes, or mounts in which all of /proc is to be seen. The answer is the first process's number. */
static void make(void) {
    char path[64];
    int parent = file(1), channel = file(2), program = file(3);
    doing("mounts that cover nothing of /proc", "");
    if (word())
        must(CALL(setns, file(4), CLONE_NEWNS));
    join_parent(parent);
    /* A changed id closes what lies in /proc of us and our children, from where they are mapped. */
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
    write_to(open_own(of_process(path, (unsigned long)process, "/uid_map"), O_WRONLY), uids, length(uids));
    doing("groups", "");
    write_to(open_own(of_process(path, (unsigned long)process, "/gid_map"), O_WRONLY), gids, length(gids));
    must(tell(STARTED, process, -1));
    end(0);
}

/*
 * Prepare: what the container runtime has started, so that from now on it is as one that was made here. It leaves open
 * file systems in memory without bounds, and further user namespaces; and it shows accounts, hosts, nameservers, time
 * zone, network devices and control groups of the host.
 */

/* Some machines let nobody change a mount, or mount another; one of the host that is bound in has its own bound. */
static void if_allowed(long result) {
    if (result != -EPERM && result != -EACCES)
        must(result);
}

/* A name as the kernel tells it in a table of mounts: what would end it is a backslash and three octal digits there. */
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
    /* Not /proc/self: this process has none of the numbers that /proc shows. */
    struct table mounts = table_of("/proc/1/mounts");
    for (int count; (count = line_of(&mounts, fields, ' '));) {
        char target[LONGEST_PATH];
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

/* Its files: where to write the variables of its first process, which may say of any part of its memory that they are
   there, and be read for ever: not for longer than so many seconds. */
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
        /* What the runtime mounted by way of a link may hide the settings below, or be nothing of the kernel's. */
        if (!S_ISDIR(found.stx_mode))
            refuse(path, "of the image is no folder of its own", ENOTDIR);
    }
    doing("its variables", "");
    proc = must(open_inside("/proc", O_PATH | O_DIRECTORY | O_NOFOLLOW));
    /* The image's own shell, which runs already, may have made another folder its root, with one of this name in it. */
    must(CALL(fstatfs, proc, &system));
    if (system.kind != PROC_SUPER_MAGIC || about(proc).stx_ino != PROC_ROOT_INODE)
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
    /* What it mounted with contents of the host; nothing is there if it was set up not to. */
    for (size_t count = several(); count--;)
        CALL(umount2, text(), MNT_DETACH | UMOUNT_NOFOLLOW);
    /* What it copied. */
    for (size_t count = several(); count--;)
        CALL(unlinkat, AT_FDCWD, text(), 0);
    /* Where the kernel takes who is inside for its own root, the runtime was told to lock what is locked in others. */
    int owned = (int)word();
    if (owned)
        CALL(umount2, "/proc/sys", MNT_DETACH | UMOUNT_NOFOLLOW);
    settle((int)proc);
    if (owned) {
        struct mount_attr locked = {MOUNT_ATTR_RDONLY, 0, 0, 0};
        for (int index = 0; index < COUNT_OF_DEVICES; index++)
            CALL(mount_setattr, AT_FDCWD, DEVICES[index], 0, &locked, sizeof locked);
        lock_kernels();
    }
    must(tell(DONE, 0, -1));
    end(0);
}

/* The launcher, and the program. */

enum { MAKE = 1, SPAWN, PUT, GET, ERASE, PREPARE, STOP };

struct header { uint32_t kind, grouped; uint64_t size; };

/* In a child: do what was asked. A request that is larger than a packet is in the last of its files. */
static void carry_out(struct header header, size_t size) {
    report = files[0];
    /* It is the launcher's alone, whose end the supervisor sees by it: what takes long, or is stopped for ever in a
       sandbox, must not keep it. */
    must(CALL(close, CHANNEL));
    /* It joins the sandbox meanwhile. */
    if (header.kind != SPAWN)
        wait_for_word();
    if (header.size != size) {
        int held = file(count_of_files - 1);
        if (about(held).stx_size < header.size)
            fail(FAILED, EBADMSG);
        at = (const char *)must(CALL(mmap, 0, header.size, PROT_READ, MAP_PRIVATE, held, 0));
        limit = at + header.size;
        CALL(close, held);
        count_of_files--;
    }
    static void (*const KINDS[])(void) = {
        [MAKE] = make, [SPAWN] = spawn, [PUT] = put, [GET] = get, [ERASE] = remove_left, [PREPARE] = prepare,
        [STOP] = stop,
    };
    if (header.kind < sizeof KINDS / sizeof *KINDS && KINDS[header.kind])
        KINDS[header.kind]();
    fail(FAILED, EBADMSG);
}

static void serve(void) {
    report = -1;
    doing("start", "");
    static union { struct control head; char room[sizeof(struct control) + MOST_FILES * sizeof(int)]; } rights;
    must(CALL(prctl, PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0));
    must(CALL(prctl, PR_SET_DUMPABLE, 0, 0, 0, 0));
    CALL(close_range, CHANNEL + 1, ~0U, 0);
    /* What is started here ignores no signal and holds none back, whatever our own parents do: nohup is one. */
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
            process = header.grouped ? CALL(clone3, &how, sizeof how) : fork_beside();
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
                carry_out(header, (size_t)size - sizeof header);
            }
        }
        for (int index = 0; index < count_of_files; index++)
            CALL(close, files[index]);
        CALL(sendto, CHANNEL, &process, sizeof process, MSG_NOSIGNAL, 0, 0);
    }
}

/* "eraser", a folder, and the number of an open file, if one is the parent namespace of those whose files are in it. */
static void erase_as_told(const char **arguments) {
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
        erase_as_told(arguments);
    serve();
    end(0);
}
