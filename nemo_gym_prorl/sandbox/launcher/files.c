// SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
// SPDX-License-Identifier: Apache-2.0
/*
 * Files of sandboxes, a part of launcher.c: copied in and out, and removed.
 *
 * Whoever is inside can change what a name means at any time. So each is looked up in an open folder, and what is found
 * is acted on as it was found; by a process that is outside of the sandbox's process numbers, so that /proc/self leads
 * nowhere. He can also have an error of a file look like one of the machine, after which a rollout is tried again. What
 * such a file can be told by is said here, as an error that is the file's.
 */

enum { CHUNK = 1 << 20, MOST_LINKS = 40, SIZE_OF_NAME = 34 };
enum { TO_DATA = 3, TO_HOLE = 4 };             /* SEEK_DATA and SEEK_HOLE, which the C library has for GNU only */
enum { LOOKS = 20 };                           /* at a file that can't be opened, before that is the disk's fault */
enum { LEASED_MS = 1000, LEASED_PAUSE_MS = 20 }; /* for somebody inside to give up a lease, as the kernel tells him to */

/* A name that nobody has thought of. */
static void draw_name(char *name) {
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
    struct statx other = about(held);
    CALL(close, held);
    return same_file_system(found, &other);
}

/* Copy a file from its beginning, at most so much, with its holes; the errors of either side apart. Returns whether that
   was all. Only a file with fewer blocks than bytes is asked for holes: the kernel's own have no size and no data. */
static int copy(long source, long target, uint64_t most, long *reading, long *writing) {
    struct statx found = about(source);
    int sparse = S_ISREG(found.stx_mode) && found.stx_blocks * 512 < found.stx_size;
    char *chunk = room(CHUNK);
    *writing = 0;
    /* That a file may be no larger is an error like others. */
    ignore(SIGXFSZ);
    for (uint64_t place = 0, hole = 0;; place += (uint64_t)*reading) {
        if (sparse && place == hole) {
            long data = CALL(lseek, source, place, TO_DATA), size = CALL(lseek, source, 0, SEEK_END);
            int is_last = data == -ENXIO && size > (long)place;
            if (is_last || data > (long)place) {
                place = (uint64_t)(is_last ? size : data);
                if (place > most)
                    return 0;
                *writing = is_last ? CALL(ftruncate, target, place) : CALL(lseek, target, place, SEEK_SET);
            }
            *reading = 0;
            if (data == -ENXIO || is_error(*writing))
                return 1;
            long next = is_error(data) ? data : CALL(lseek, source, place, TO_HOLE);
            sparse = next > (long)place; /* or the file system does not know */
            hole = (uint64_t)next;
            must(CALL(lseek, source, place, SEEK_SET));
        }
        *reading = CALL(read, source, chunk, sparse && hole - place < CHUNK ? hole - place : CHUNK);
        if (*reading <= 0)
            return 1;
        if ((uint64_t)*reading > most - place)
            return 0;
        for (long done = 0; done < *reading; done += *writing) {
            *writing = CALL(write, target, chunk + done, *reading - done);
            if (is_error(*writing))
                return 1;
        }
    }
}

/* What the file system of a folder says. That there is no room is the machine's, unless it is one of the sandbox's own
   in memory; that of message queues says EMFILE. */
static long with_room(long result, long folder, const char *path) {
    struct statx found = about(folder);
    if ((result == -ENOSPC || result == -EDQUOT || result == -EMFILE) && !is_in_file_system_of(&found, "/")) {
        doing("there is no room for it in the file system of", path);
        fail(FAILED, EFBIG);
    }
    return must(result);
}

/* Put: the folder that so much of a name leads to from an open one, or from the root; where a path is given, which it is
   of, those that are missing are made. Step by step, so that no link that changes is followed to another one when it is
   asked whose error there was. */
static long folder_of(long from, const char *name, size_t size, const char *path) {
    char each[LONGEST_PATH];
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
                with_room(made, above, path);
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

/* Make a path a file with the contents of another, and say whether there was one; missing folders are made. Never half
   a file. Without a mode it keeps the one that it has, if there is one. */
static void put(void) {
    char link[LONGEST_PATH], fresh[SIZE_OF_NAME];
    struct statx found;
    join();
    const char *path = text(), *name = last_name(path);
    unsigned mode = (unsigned)word();
    doing(path, "");
    CALL(umask, 022);
    long folder = folder_of(-1, path, (size_t)(name - path), path), existed;
    for (int links = 0;; links++) {
        memset(&found, 0, sizeof found);
        int flags = AT_SYMLINK_NOFOLLOW | (*name ? 0 : AT_EMPTY_PATH);
        existed = unless(ENOENT, CALL(statx, folder, name, flags, STATX_BASIC_STATS, &found)) == 0;
        if (!existed || !S_ISLNK(found.stx_mode))
            break;
        if (links == MOST_LINKS)
            fail(FAILED, ELOOP);
        long size = must(CALL(readlinkat, folder, name, link, sizeof link - 1)), before = folder;
        link[size] = 0;
        name = last_name(link);
        folder = folder_of(before, link, (size_t)(name - link), 0);
        CALL(close, before);
    }
    if (S_ISDIR(found.stx_mode)) {
        doing(path, "is a folder; name the file");
        fail(FAILED, EISDIR);
    }
    if (mode == UINT32_MAX)
        mode = existed ? found.stx_mode & 07777 : 0644;
    draw_name(fresh);
    int flags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
    long target = with_room(CALL(openat, folder, fresh, flags, 0600), folder, path), reading, writing;
    copy(file(2), target, UINT64_MAX, &reading, &writing);
    long done = is_error(reading) ? reading : writing;
    if (!is_error(done))
        done = CALL(fchmod, target, mode);
    if (!is_error(done))
        done = CALL(renameat, folder, fresh, folder, name);
    if (is_error(done))
        CALL(unlinkat, folder, fresh, 0);
    with_room(done, folder, path);
    must(tell(DONE, existed, -1));
    end(0);
}

/* Get. */

/* Whether a file can have an error of a disk: none of the kernel's own can. */
static int is_on_disk(const struct statx *found) {
    return S_ISREG(found->stx_mode) && found->stx_size && !is_in_file_system_of(found, "/proc") &&
           !is_in_file_system_of(found, "/sys");
}

static void refuse(const char *path, const char *why, int number) __attribute__((noreturn));
static void refuse(const char *path, const char *why, int number) {
    doing(path, why);
    fail(FAILED, number);
}

/* Open what may be a file; what somebody inside has a lease on he has to give up soon. That it can't be read is the
   disk's only if it is an ordinary one every time: who is inside can have a name lead to a terminal that fails, and
   quickly to something else. */
static long open_to_read(const char *path) {
    for (int looks = 1, waited = 0;;) {
        long found = open_inside(path, O_RDONLY);
        if (found == -EAGAIN) {
            if (waited >= LEASED_MS)
                refuse(path, "is held by a program that does not let go of it", EBUSY);
            pause_ms(LEASED_PAUSE_MS);
            waited += LEASED_PAUSE_MS;
        } else if (found == -EIO && looks++ < LOOKS) {
            long held = must(open_inside(path, O_PATH));
            struct statx what = about(held);
            if (!is_on_disk(&what))
                refuse(path, "is not an ordinary file", EINVAL);
            CALL(close, held);
        } else {
            return must(found);
        }
    }
}

/* Copy an ordinary file out, of at most so many bytes, however it grows meanwhile. */
static void get(void) {
    join();
    uint64_t rights = word(), most = word();
    const char *path = text();
    long reading, writing;
    doing(path, "");
    /* Those of the sandbox's commands, to which /proc tells nothing of the first process. */
    keep_rights(rights);
    long source = open_to_read(path);
    struct statx found = about(source);
    if (S_ISDIR(found.stx_mode))
        refuse(path, "is a folder; name a file", EISDIR);
    if (!S_ISREG(found.stx_mode))
        refuse(path, "is not an ordinary file", EINVAL);
    /* Said before a gigabyte of it, or of its holes, was copied. */
    if (found.stx_size > most || !copy(source, file(2), most, &reading, &writing)) {
        char limit[64] = "has more than the limit of ";
        memcpy(digits(limit + length(limit), most), " bytes", sizeof " bytes");
        refuse(path, limit, EFBIG);
    }
    if (reading == -EIO && !is_on_disk(&found))
        refuse(path, "can't be read through", EINVAL);
    must(reading);
    must(writing);
    must(tell(DONE, 0, -1));
    end(0);
}

/*
 * Erase: what sandboxes left, however it was made: deep, long, closed to its owner.
 *
 * Somebody may still hold it open and change it meanwhile: another sandbox that was handed a folder. So each name is one
 * in a folder that is held open, to which no link led. And as root each folder is taken from its owner first, or he
 * could fill it faster than it is emptied, with what is counted as nobody's. An ordinary user's sandboxes are all the
 * same owner's: there, who was handed a folder can do so for as long as he lives.
 */

enum { DEEPEST = 100 }; /* of the folders that are open at a time: what lies deeper is moved to the top */
enum { ATTEMPTS = 3, MOST_ROUNDS = 10000, REMOVE_MS = 1000 };

struct entry { uint64_t inode; int64_t next; uint16_t size; uint8_t kind; char name[]; };

static int has_changed(long error) {
    return error == -ENOENT || error == -ENOTDIR || error == -ELOOP;
}

/* Open a folder for its owner to do all in it, and nobody else: also where a sandbox took away its own permissions. */
static long open_to_empty(long above, const char *name) {
    static const int flags = O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
    long found = CALL(openat, above, name, flags | O_RDONLY, 0);
    if (found == -EACCES) {
        char path[40] = "/proc/self/fd/";
        long held = CALL(openat, above, name, flags | O_PATH, 0);
        if (is_error(held))
            return held;
        /* What lies open by this number is that one, whatever has its name by now. */
        *digits(path + length(path), (unsigned long)held) = 0;
        must(CALL(fchmodat, AT_FDCWD, path, 0700));
        CALL(close, held);
        found = CALL(openat, above, name, flags | O_RDONLY, 0);
    }
    if (is_error(found))
        return found;
    struct statx status = about(found);
    int root = CALL(geteuid) == 0;
    if (root && (status.stx_uid || status.stx_mode & 022))
        must(CALL(fchown, found, 0, 0));
    if (root ? status.stx_uid || status.stx_mode & 022 : ~status.stx_mode & 0700)
        must(CALL(fchmod, found, 0700));
    return found;
}

static void empty(long folder, long top, int depth);

/* What a name has become meanwhile is seen when its folder is read again. */
static void remove_entry(long folder, const char *name, long top, int depth) {
    char fresh[SIZE_OF_NAME];
    long done = CALL(unlinkat, folder, name, 0);
    for (int attempt = 0; done == -EISDIR || done == -ENOTEMPTY; attempt++) {
        done = CALL(unlinkat, folder, name, AT_REMOVEDIR);
        /* Some file systems skip entries while others are removed. */
        if (done != -ENOTEMPTY || attempt == ATTEMPTS)
            break;
        long found = open_to_empty(folder, name);
        if (has_changed(found))
            return;
        must(found);
        if (depth < DEEPEST) {
            empty(found, top, depth + 1);
        } else {
            draw_name(fresh);
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

/* As "rm -rf". */
static void erase(const char *path) {
    doing("can't be removed:", path);
    for (int attempt = 0;; attempt++) {
        long top = unless(ENOENT, open_to_empty(AT_FDCWD, path));
        if (top == -ENOENT)
            return;
        empty(top, top, 0);
        CALL(close, top);
        /* What was moved there meanwhile is seen the next time. */
        long done = CALL(unlinkat, AT_FDCWD, path, AT_REMOVEDIR);
        if (done != -ENOTEMPTY || attempt == MOST_ROUNDS) {
            unless(ENOENT, done);
            return;
        }
    }
}

/* Remove a control group, which is the proof that nothing lives in it. */
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

static void remove_left(void) {
    const char *group = text(), *folder = text();
    if (*folder != '/')
        fail(FAILED, EBADMSG);
    if (*group)
        remove_group(group);
    erase(folder);
    must(tell(DONE, 0, -1));
    end(0);
}
