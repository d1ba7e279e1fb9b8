/* What a stream brings: the rest of a value, right behind the bytes that are there, and the words of requests in the
 * Redis protocol. Twin: twin/sockets.py. */
#include "fast.h"

#include <errno.h>
#include <sys/socket.h>
#include <time.h>

#define SPIN_S 30e-6 /* So long bytes are asked for before the thread sleeps: waking it takes as long. */

static double monotonic_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* One call for a value and what follows it; what recvmsg returns. ``at``: bytes of both that are here. */
static Py_ssize_t receive(int fd, char *data, Py_ssize_t size, Py_buffer *tail, Py_ssize_t at)
{
    struct iovec parts[2];
    struct msghdr message = {.msg_iov = parts};
    if (at < size)
        parts[message.msg_iovlen++] = (struct iovec){data + at, (size_t)(size - at)};
    Py_ssize_t behind = at > size ? at - size : 0;
    if (behind < tail->len)
        parts[message.msg_iovlen++] = (struct iovec){(char *)tail->buf + behind, (size_t)(tail->len - behind)};
    double until_s = monotonic_s() + SPIN_S;
    for (;;) {
        Py_ssize_t got = recvmsg(fd, &message, MSG_DONTWAIT);
        if (got >= 0 || (errno != EAGAIN && errno != EWOULDBLOCK))
            return got;
        if (monotonic_s() > until_s)
            return recvmsg(fd, &message, MSG_WAITALL);
    }
}

PyObject *sky_py_receive_all(PyObject *self, PyObject *args)
{
    int fd;
    Py_buffer head, tail;
    Py_ssize_t size, at, got = 1;
    double timeout_s;
    if (!PyArg_ParseTuple(args, "iy*ndw*", &fd, &head, &size, &timeout_s, &tail))
        return NULL;
    at = head.len;
    double until_s = monotonic_s() + timeout_s;
    Py_ssize_t whole = -1, all = -1;
    if (size < 0)
        PyErr_Format(PyExc_ValueError, "%zd bytes", size);
    else if ((whole = sky_sum(head.len, size)) >= 0)
        all = sky_sum(whole, tail.len);
    PyObject *made = all < 0 ? NULL : PyBytes_FromStringAndSize(NULL, whole);
    if (made) {
        char *data = PyBytes_AsString(made);
        memcpy(data, head.buf, (size_t)head.len);
        while (at < all) {
            Py_BEGIN_ALLOW_THREADS
            got = receive(fd, data, whole, &tail, at);
            Py_END_ALLOW_THREADS
            if (got < 0 && errno == EINTR && PyErr_CheckSignals() == 0)
                continue;
            if (got <= 0)
                break;
            at += got;
            if (at < all && monotonic_s() > until_s) {
                PyErr_Format(PyExc_TimeoutError, "%zd bytes of the value did not come in time", all - at);
                break;
            }
        }
        if (at < all) {
            if (got == 0 && !PyErr_Occurred())
                PyErr_Format(PyExc_ConnectionError, "the stream ended %zd bytes before the value did", all - at);
            else if (!PyErr_Occurred())
                PyErr_SetFromErrno(PyExc_OSError);
            Py_CLEAR(made);
        }
    }
    PyBuffer_Release(&head);
    PyBuffer_Release(&tail);
    return made;
}

/* The number in a line such as "$12\r\n", and where the next line begins; -1 where no such line is here. */
static Py_ssize_t number_at(const char *data, Py_ssize_t size, Py_ssize_t at, char mark, Py_ssize_t *next)
{
    Py_ssize_t number = 0;
    if (at >= size || data[at] != mark)
        return -1;
    Py_ssize_t digits = ++at;
    for (; at < size && at - digits < 12 && data[at] >= '0' && data[at] <= '9'; at++)
        if (__builtin_mul_overflow(number, 10, &number) || __builtin_add_overflow(number, data[at] - '0', &number))
            return -1;
    if (at == digits || size - at < 2 || data[at] != '\r' || data[at + 1] != '\n')
        return -1;
    *next = at + 2;
    return number;
}

PyObject *sky_py_request_words(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    Py_ssize_t given[5], next, size; /* at, missing, most words, most bytes of one, and of all together */
    if (count != 6)
        return PyErr_Format(PyExc_TypeError, "request_words: expected 6 arguments, got %zd", count);
    for (int one = 0; one < 5; one++) {
        given[one] = PyLong_AsSsize_t(args[one + 1]);
        if (given[one] == -1 && PyErr_Occurred())
            return NULL;
        if (given[one] < 0)
            return PyErr_Format(PyExc_ValueError, "request_words: %zd is below 0", given[one]);
    }
    Py_ssize_t at = given[0], missing = given[1], room = given[4];
    Py_buffer data;
    if (PyObject_GetBuffer(args[0], &data, PyBUF_SIMPLE) < 0)
        return NULL;
    PyObject *words = PyList_New(0);
    if (words && !missing) {
        size = number_at(data.buf, data.len, at, '*', &next);
        if (size > 0 && size <= given[2]) {
            missing = size;
            at = next;
        }
    }
    while (words && missing) {
        const char *bytes = data.buf;
        size = number_at(bytes, data.len, at, '$', &next);
        if (size < 0 || size > given[3] || size > room || size > data.len - next - 2 || bytes[next + size] != '\r' ||
            bytes[next + size + 1] != '\n')
            break;
        PyObject *word = PyBytes_FromStringAndSize(bytes + next, size);
        if (!word || PyList_Append(words, word) < 0)
            Py_CLEAR(words);
        Py_XDECREF(word);
        at = next + size + 2;
        room -= size;
        missing--;
    }
    PyBuffer_Release(&data);
    return words ? Py_BuildValue("Nnn", words, at, missing) : NULL;
}
