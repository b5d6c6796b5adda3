// A disk that fails for good, for a process that is started with this library in LD_PRELOAD: of the calls that write to
// files below FAILS_BELOW (and, with FAILS_READS, that read from open ones), number FAILS_FROM and all behind it fail
// with the error number FAILS_WITH.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static int fails(const char *path, int reads) {
    static int calls;
    const char *below = getenv("FAILS_BELOW");
    if (!below || !strstr(path, below) || (reads && !getenv("FAILS_READS"))) return 0;
    if (__sync_add_and_fetch(&calls, 1) < atoi(getenv("FAILS_FROM"))) return 0;
    errno = atoi(getenv("FAILS_WITH"));
    return 1;
}

static const char *path_of(int file, const char *name, char *room) {
    char link[64];
    if (name && (name[0] == '/' || file == AT_FDCWD)) return name;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t size = readlink(link, room, PATH_MAX);
    snprintf(room + (size < 0 ? 0 : size), PATH_MAX, "/%s", name ? name : "");
    return room;
}

// A call `result name(parameters)` about `file`, or about `path` seen from the folder `file`, passed on as `arguments`.
#define CALL(result, name, parameters, arguments, file, path, reads) \
    result name parameters {                                         \
        static result (*real) parameters;                            \
        char room[2 * PATH_MAX];                                     \
        if (!real) real = dlsym(RTLD_NEXT, #name);                   \
        if (fails(path_of(file, path, room), reads)) return -1;      \
        return real arguments;                                       \
    }

CALL(int, fsync, (int f), (f), f, NULL, 0)
CALL(int, fdatasync, (int f), (f), f, NULL, 0)
CALL(int, ftruncate64, (int f, off_t n), (f, n), f, NULL, 0)
CALL(ssize_t, write, (int f, const void *p, size_t n), (f, p, n), f, NULL, 0)
CALL(ssize_t, pwrite64, (int f, const void *p, size_t n, off_t o), (f, p, n, o), f, NULL, 0)
CALL(ssize_t, pwritev64v2, (int f, const struct iovec *v, int n, off_t o, int m), (f, v, n, o, m), f, NULL, 0)
CALL(ssize_t, pwritev64, (int f, const struct iovec *v, int n, off_t o), (f, v, n, o), f, NULL, 0)
CALL(ssize_t, pread64, (int f, void *p, size_t n, off_t o), (f, p, n, o), f, NULL, 1)
CALL(ssize_t, preadv64v2, (int f, const struct iovec *v, int n, off_t o, int m), (f, v, n, o, m), f, NULL, 1)
CALL(ssize_t, preadv64, (int f, const struct iovec *v, int n, off_t o), (f, v, n, o), f, NULL, 1)
CALL(int, rename, (const char *a, const char *b), (a, b), AT_FDCWD, b, 0)
CALL(int, mkdir, (const char *p, mode_t m), (p, m), AT_FDCWD, p, 0)
CALL(int, rmdir, (const char *p), (p), AT_FDCWD, p, 0)
CALL(int, unlink, (const char *p), (p), AT_FDCWD, p, 0)
CALL(int, unlinkat, (int d, const char *p, int m), (d, p, m), d, p, 0)

int open64(const char *path, int flags, ...) {
    static int (*real)(const char *, int, ...);
    mode_t mode = 0;
    va_list rest;
    va_start(rest, flags);
    if (flags & (O_CREAT | O_TMPFILE)) mode = va_arg(rest, mode_t);
    va_end(rest);
    if (!real) real = dlsym(RTLD_NEXT, "open64");
    if ((flags & (O_WRONLY | O_RDWR)) && fails(path, 0)) return -1;
    return real(path, flags, mode);
}
