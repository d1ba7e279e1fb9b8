/* Reads a file without waiting for its disk: what the kernel has in memory, or nothing. Twin: twin/backend.py. */
#define _GNU_SOURCE
#include "fast.h"

#ifdef __linux__
#include <fcntl.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>
#endif

#if defined(__linux__) && defined(SYS_openat2) && defined(RWF_NOWAIT)
/* As in <linux/openat2.h>, which older headers lack: an open that would have to ask the disk fails. */
#define RESOLVE_CACHED 0x20
struct how {
    uint64_t flags, mode, resolve;
};

/* Bytes read; -1 where any of it would have to wait, or fails. */
static Py_ssize_t read_now(const char *path, const Py_buffer *head, const Py_buffer *out, Py_ssize_t all)
{
    struct how how = {.flags = O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, .resolve = RESOLVE_CACHED};
    long fd = syscall(SYS_openat2, AT_FDCWD, path, &how, sizeof how);
    if (fd < 0)
        return -1;
    Py_ssize_t at = 0, got = 1;
    while (got > 0 && at < all) {
        struct iovec parts[2] = {{(char *)head->buf + at, at < head->len ? (size_t)(head->len - at) : 0},
                                 {out->buf, (size_t)out->len}};
        struct iovec rest = {(char *)out->buf + at - head->len, (size_t)(all - at)};
        got = at < head->len ? preadv2((int)fd, parts, 2, at, RWF_NOWAIT) : preadv2((int)fd, &rest, 1, at, RWF_NOWAIT);
        at += got > 0 ? got : 0;
    }
    close((int)fd);
    return got < 0 ? -1 : at;
}
#else
static Py_ssize_t read_now(const char *path, const Py_buffer *head, const Py_buffer *out, Py_ssize_t all)
{
    return -1;
}
#endif

PyObject *sky_py_read_cached(PyObject *self, PyObject *args)
{
    PyObject *path;
    Py_buffer head, out;
    if (!PyArg_ParseTuple(args, "O&w*w*:read_cached", PyUnicode_FSConverter, &path, &head, &out))
        return NULL;
    Py_ssize_t got = -1, all = sky_sum(head.len, out.len);
    const char *name = PyBytes_AsString(path);
    if (all >= 0) {
        Py_BEGIN_ALLOW_THREADS
        got = read_now(name, &head, &out, all);
        Py_END_ALLOW_THREADS
    }
    Py_DECREF(path);
    PyBuffer_Release(&head);
    PyBuffer_Release(&out);
    if (all < 0)
        return NULL;
    if (got < 0)
        Py_RETURN_NONE;
    return PyLong_FromSsize_t(got);
}
