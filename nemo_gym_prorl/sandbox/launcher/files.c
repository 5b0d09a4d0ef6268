// SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
// SPDX-License-Identifier: Apache-2.0
/*
 * Files of sandboxes, a part of launcher.c: copied in and out, and removed.
 *
 * A sandboxed process can replace a file or folder by a symlink at any time. So each name is looked up relative to an
 * open folder, and only the opened file is used. The process that does this is not in the PID namespace of the
 * sandbox's /proc, where /proc/self therefore leads nowhere.
 *
 * A sandboxed process can also cause errors that look like errors of the machine, after which a rollout would be
 * retried. Where such an error can be distinguished from a real one, it is reported as an error of the file.
 */

enum { CHUNK = 1 << 20, MAX_LINKS = 40, SIZE_OF_NAME = 34 }; /* bytes of a read; symlinks; bytes of a random name */
enum { OPEN_ATTEMPTS = 20 }; /* attempts to open a file that fails with EIO, before the disk is taken as the cause */
enum { LEASE_TIMEOUT_MS = 1000, LEASE_PAUSE_MS = 20 }; /* the kernel asks the holder of a lease to release it */

/* Write a random file name, which no sandboxed process can predict. */
static void random_name(char *name) {
    unsigned char drawn[(SIZE_OF_NAME - 2) / 2];
    must(CALL(getrandom, drawn, sizeof drawn, 0));
    *name++ = '.';
    for (size_t index = 0; index < sizeof drawn; index++) {
        *name++ = "0123456789abcdef"[drawn[index] >> 4];
        *name++ = "0123456789abcdef"[drawn[index] & 15];
    }
    *name = 0;
}

static int same_file_system(const struct statx *one, const struct statx *other) {
    return one->stx_dev_major == other->stx_dev_major && one->stx_dev_minor == other->stx_dev_minor;
}

static int is_in_file_system_of(const struct statx *found, const char *path) {
    long held = must(open_inside(path, O_PATH));
    struct statx other = stat_of(held);
    CALL(close, held);
    return same_file_system(found, &other);
}

/* Copy at most "most" bytes of a file; return whether the file was copied completely. The last results of read and
   write are stored, so that the caller can distinguish the errors. */
static int copy(long source, long target, uint64_t most, long *reading, long *writing) {
    char *chunk = allocate(CHUNK);
    *writing = 0;
    /* With SIGXFSZ ignored, a write above RLIMIT_FSIZE fails with EFBIG. */
    ignore(SIGXFSZ);
    for (;; most -= (uint64_t)*reading) {
        *reading = CALL(read, source, chunk, CHUNK);
        if (*reading <= 0)
            return 1;
        if ((uint64_t)*reading > most)
            return 0;
        for (long done = 0; done < *reading; done += *writing) {
            *writing = CALL(write, target, chunk + done, *reading - done);
            if (is_error(*writing))
                return 1;
        }
    }
}

/* Check the result of a write in a folder. No space is an error of the machine only on the file system of the sandbox's
   root; others, such as /dev/shm, are filled by the sandbox. A full mqueue file system returns EMFILE. */
static long check_space(long result, long folder, const char *path) {
    struct statx found = stat_of(folder);
    if ((result == -ENOSPC || result == -EDQUOT || result == -EMFILE) && !is_in_file_system_of(&found, "/")) {
        doing("no space is left in the file system of", path);
        fail(FAILED, EFBIG);
    }
    return must(result);
}

/* Put: open the folder at the first "size" bytes of a name, relative to an open folder or the root. If "path" is given,
   missing folders are created; errors name it. The name is resolved component by component, so that a folder replaced
   by a symlink in between cannot redirect the creation of the next one. */
static long open_parent(long from, const char *name, size_t size, const char *path) {
    char each[MAX_PATH];
    int top = *name == '/' || from < 0;
    long here = must(top ? open_inside("/", O_PATH | O_DIRECTORY) : CALL(fcntl, from, F_DUPFD_CLOEXEC, 0));
    for (size_t begin = 0, end; begin < size; begin = end + 1) {
        for (end = begin; end < size && name[end] != '/'; end++)
            ;
        if (end - begin >= sizeof each)
            fail(FAILED, ENAMETOOLONG);
        if (end == begin)
            continue;
        memcpy(each, name + begin, end - begin);
        each[end - begin] = 0;
        long above = here;
        here = open_in(above, each, O_PATH | O_DIRECTORY);
        if (here == -ENOENT && path) {
            long made = CALL(mkdirat, above, each, 0777);
            if (made != -EEXIST)
                check_space(made, above, path);
            here = open_in(above, each, O_PATH | O_DIRECTORY);
        }
        must(here);
        CALL(close, above);
    }
    return here;
}

static const char *last_name(const char *path) {
    const char *name = path + length(path);
    while (name > path && name[-1] != '/')
        name--;
    return name;
}

/* Put: replace or create a file atomically, with the contents of the sent file; reply with whether the file existed.
   Missing folders are created. Without a mode, an existing file keeps its mode, and a new file gets 0644. */
static void put(void) {
    char link[MAX_PATH], fresh[SIZE_OF_NAME];
    struct statx found;
    join();
    const char *path = text(), *name = last_name(path);
    unsigned mode = (unsigned)word();
    doing(path, "");
    CALL(umask, 022);
    long folder = open_parent(-1, path, (size_t)(name - path), path), existed;
    for (int links = 0;; links++) {
        memset(&found, 0, sizeof found);
        int flags = AT_SYMLINK_NOFOLLOW | (*name ? 0 : AT_EMPTY_PATH);
        existed = unless(ENOENT, CALL(statx, folder, name, flags, STATX_BASIC_STATS, &found)) == 0;
        if (!existed || !S_ISLNK(found.stx_mode))
            break;
        if (links == MAX_LINKS)
            fail(FAILED, ELOOP);
        long size = must(CALL(readlinkat, folder, name, link, sizeof link - 1)), before = folder;
        link[size] = 0;
        name = last_name(link);
        folder = open_parent(before, link, (size_t)(name - link), 0);
        CALL(close, before);
    }
    if (S_ISDIR(found.stx_mode)) {
        doing(path, "is a folder; name the file");
        fail(FAILED, EISDIR);
    }
    if (mode == UINT32_MAX)
        mode = existed ? found.stx_mode & 07777 : 0644;
    random_name(fresh);
    int flags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
    long target = check_space(CALL(openat, folder, fresh, flags, 0600), folder, path), reading, writing;
    copy(file(2), target, UINT64_MAX, &reading, &writing);
    long done = is_error(reading) ? reading : writing;
    if (!is_error(done))
        done = CALL(fchmod, target, mode);
    if (!is_error(done))
        done = CALL(renameat, folder, fresh, folder, name);
    if (is_error(done))
        CALL(unlinkat, folder, fresh, 0);
    check_space(done, folder, path);
    must(reply(DONE, existed, -1));
    end(0);
}

/* Get. */

/* Return whether the disk can be the cause of errors of this file; files of kernel file systems are on no disk. */
static int is_on_disk(const struct statx *found) {
    return S_ISREG(found->stx_mode) && found->stx_size && !is_in_file_system_of(found, "/proc") &&
           !is_in_file_system_of(found, "/sys");
}

static void refuse(const char *path, const char *why, int number) __attribute__((noreturn));
static void refuse(const char *path, const char *why, int number) {
    doing(path, why);
    fail(FAILED, number);
}

/* Open a file for reading; wait until a lease on it is released. EIO is attributed to the disk only if the file is a
   regular file at every attempt: a sandboxed process can let the name lead to a terminal, whose open fails with EIO,
   and then replace it by a regular file. */
static long open_to_read(const char *path) {
    for (int attempts = 1, waited = 0;;) {
        long found = open_inside(path, O_RDONLY);
        if (found == -EAGAIN) {
            if (waited >= LEASE_TIMEOUT_MS)
                refuse(path, "is leased by a program that does not release it", EBUSY);
            pause_ms(LEASE_PAUSE_MS);
            waited += LEASE_PAUSE_MS;
        } else if (found == -EIO && attempts++ < OPEN_ATTEMPTS) {
            long held = must(open_inside(path, O_PATH));
            struct statx what = stat_of(held);
            if (!is_on_disk(&what))
                refuse(path, "is not a regular file", EINVAL);
            CALL(close, held);
        } else {
            return must(found);
        }
    }
}

/* Get: copy a regular file of at most "most" bytes into the sent file, also if a process appends to it meanwhile. */
static void get(void) {
    join();
    uint64_t rights = word(), most = word();
    const char *path = text();
    long reading, writing;
    doing(path, "");
    /* With no more capabilities than commands, this process cannot read files of the first process in /proc. */
    keep_rights(rights);
    long source = open_to_read(path);
    struct statx found = stat_of(source);
    if (S_ISDIR(found.stx_mode))
        refuse(path, "is a folder; name a file", EISDIR);
    if (!S_ISREG(found.stx_mode))
        refuse(path, "is not a regular file", EINVAL);
    /* Refuse a large file, also one that consists of holes, before anything is copied. */
    if (found.stx_size > most || !copy(source, file(2), most, &reading, &writing)) {
        char limit[64] = "has more than the limit of ";
        memcpy(digits(limit + length(limit), most), " bytes", sizeof " bytes");
        refuse(path, limit, EFBIG);
    }
    if (reading == -EIO && !is_on_disk(&found))
        refuse(path, "can't be read to its end", EINVAL);
    must(reading);
    must(writing);
    must(reply(DONE, 0, -1));
    end(0);
}

/*
 * Erase: remove files of ended sandboxes, at any depth, path length or permission.
 *
 * Another sandbox may have a folder open, through a bind, and change the folder meanwhile. So each name is looked up
 * relative to an open folder that was reached without symlinks. Root first takes each folder from its owner, who could
 * otherwise create files faster than they are deleted, not counted by any limit. All sandboxes of an ordinary user have
 * the same owner, so there a sandbox with an open folder can delay its removal until the sandbox ends.
 */

enum { MAX_OPEN_FOLDERS = 100 }; /* depth; deeper folders are moved to the top folder */
enum { ATTEMPTS = 3, MAX_ROUNDS = 10000 }; /* attempts to empty a folder; rounds of emptying the top folder */
enum { REMOVE_MS = 1000 }; /* wait for the exiting processes of a control group */

struct entry { uint64_t inode; int64_t next; uint16_t size; uint8_t kind; char name[]; };

static int has_changed(long error) {
    return error == -ENOENT || error == -ENOTDIR || error == -ELOOP;
}

/* Open a folder, and set its owner and mode so that only this process's user may change the folder. */
static long open_to_empty(long above, const char *name) {
    static const int flags = O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
    long found = CALL(openat, above, name, flags | O_RDONLY, 0);
    if (found == -EACCES) {
        char path[40] = "/proc/self/fd/";
        long held = CALL(openat, above, name, flags | O_PATH, 0);
        if (is_error(held))
            return held;
        /* This path leads to the open folder, even if another file has the name by now. */
        *digits(path + length(path), (unsigned long)held) = 0;
        must(CALL(fchmodat, AT_FDCWD, path, 0700));
        CALL(close, held);
        found = CALL(openat, above, name, flags | O_RDONLY, 0);
    }
    if (is_error(found))
        return found;
    struct statx status = stat_of(found);
    int root = CALL(geteuid) == 0;
    if (root && (status.stx_uid || status.stx_mode & 022))
        must(CALL(fchown, found, 0, 0));
    if (root ? status.stx_uid || status.stx_mode & 022 : ~status.stx_mode & 0700)
        must(CALL(fchmod, found, 0700));
    return found;
}

static void empty(long folder, long top, int depth);

/* Remove an entry of a folder. An entry that is replaced meanwhile is found when its folder is read again. */
static void remove_entry(long folder, const char *name, long top, int depth) {
    char fresh[SIZE_OF_NAME];
    long done = CALL(unlinkat, folder, name, 0);
    for (int attempt = 0; done == -EISDIR || done == -ENOTEMPTY; attempt++) {
        done = CALL(unlinkat, folder, name, AT_REMOVEDIR);
        /* Some file systems skip entries in a listing while others are removed, so the folder is emptied again. */
        if (done != -ENOTEMPTY || attempt == ATTEMPTS)
            break;
        long found = open_to_empty(folder, name);
        if (has_changed(found))
            return;
        must(found);
        if (depth < MAX_OPEN_FOLDERS) {
            empty(found, top, depth + 1);
        } else {
            random_name(fresh);
            done = CALL(renameat, folder, name, top, fresh);
        }
        CALL(close, found);
    }
    if (!has_changed(done))
        must(done);
}

static void empty(long folder, long top, int depth) {
    _Alignas(struct entry) char entries[2048];
    for (long size; (size = must(CALL(getdents64, folder, entries, sizeof entries)));)
        for (long next = 0; next < size;) {
            const struct entry *entry = (const struct entry *)(entries + next);
            next += entry->size;
            if (!same(entry->name, ".", 2) && !same(entry->name, "..", 3))
                remove_entry(folder, entry->name, top, depth);
        }
}

/* Remove a folder, as "rm -rf". */
static void erase(const char *path) {
    doing("can't be removed:", path);
    for (int attempt = 0;; attempt++) {
        long top = unless(ENOENT, open_to_empty(AT_FDCWD, path));
        if (top == -ENOENT)
            return;
        empty(top, top, 0);
        CALL(close, top);
        /* The next round removes folders that were moved to the top folder. */
        long done = CALL(unlinkat, AT_FDCWD, path, AT_REMOVEDIR);
        if (done != -ENOTEMPTY || attempt == MAX_ROUNDS) {
            unless(ENOENT, done);
            return;
        }
    }
}

/* Remove a control group; the kernel refuses that until all processes of the group have ended. */
static void remove_group(const char *path) {
    doing("still holds processes:", path);
    for (int waited = 0;; waited++) {
        long done = CALL(unlinkat, AT_FDCWD, path, AT_REMOVEDIR);
        if (done != -EBUSY || waited == REMOVE_MS) {
            unless(ENOENT, done);
            return;
        }
        pause_ms(1);
    }
}

static void erase_sandbox(void) {
    const char *group = text(), *folder = text();
    if (*folder != '/')
        fail(FAILED, EBADMSG);
    if (*group)
        remove_group(group);
    erase(folder);
    must(reply(DONE, 0, -1));
    end(0);
}
