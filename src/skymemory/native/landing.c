/* Places the DATA that a client awaits: from runs in memory, or as it comes from the socket. Twin: twin/runs.py. */
#include "udp.h"

#include "packet.h"

#include <poll.h>
#include <stdatomic.h>
#include <time.h>

enum {
    ANSWER_AT = TELEMETRY_BYTES + 1,
    ANSWER_BYTES = 19, /* operation, flags, status, addresses, ground host, request: fields that the packets of one answer share */
    MOST_SLOTS = 64,
    MOST_PATIENCE_US = 60000000,
    MOST_SPIN_US = 150,
    SOON_US = 200, /* with the time that waking takes */
};

/* What came for one request. */
typedef struct {
    uint32_t request, echo;
    Py_ssize_t runs, placed, duplicates, corrupt, foreign;
} Tally;

/* The awaited values, by request; that of the last run is cached. */
typedef struct {
    PyObject *awaited, *landing;
    Landing opened;
    Tally *tallies;
    Py_ssize_t count, room;
    int complete; /* one of the values is */
} Landings;

static void close_landing(Landings *to)
{
    if (to->landing) {
        sky_close_landing(&to->opened);
        Py_CLEAR(to->landing);
    }
}

static int open_landing(Landings *to, PyObject *landing)
{
    if (landing == to->landing)
        return 1;
    close_landing(to);
    if (!PyTuple_Check(landing)) {
        PyErr_SetString(PyExc_TypeError, "awaited: expected a tuple for every request");
        return 0;
    }
    if (!sky_open_landing(&to->opened, landing))
        return 0;
    to->landing = Py_NewRef(landing);
    return 1;
}

static Tally *tally_of(Landings *to, uint32_t request)
{
    for (Py_ssize_t i = to->count; i-- > 0;)
        if (to->tallies[i].request == request)
            return &to->tallies[i];
    if (to->count == to->room) {
        Py_ssize_t room = to->room ? 2 * to->room : 16;
        Tally *grown = sky_realloc(to->tallies, (size_t)room, sizeof *grown);
        if (!grown) {
            PyErr_NoMemory();
            return NULL;
        }
        to->tallies = grown, to->room = room;
    }
    Tally *tally = &to->tallies[to->count++];
    *tally = (Tally){.request = request};
    return tally;
}

/* Place a run whose segments all answer one request: 1 placed, 0 no such run, -1 an exception. */
static int land(Landings *to, const uint8_t *data, size_t size, Py_ssize_t segment_bytes)
{
    size_t segment = (size_t)segment_bytes;
    if (size < TELEMETRY_BYTES + SKY_BYTES || segment_bytes < TELEMETRY_BYTES + SKY_BYTES || data[ANSWER_AT] != OP_DATA)
        return 0;
    uint32_t request = be32(data + TELEMETRY_BYTES + REQUEST_AT);
    for (size_t at = segment; at < size; at += segment)
        if (size - at < ANSWER_AT + ANSWER_BYTES || memcmp(data + at + ANSWER_AT, data + ANSWER_AT, ANSWER_BYTES))
            return 0;
    PyObject *number = PyLong_FromUnsignedLong(request);
    PyObject *landing = number ? sky_dict_get(to->awaited, number) : NULL;
    Py_XDECREF(number);
    if (!landing)
        return PyErr_Occurred() ? -1 : 0;
    int open = open_landing(to, landing);
    Py_DECREF(landing);
    if (!open)
        return -1;
    Tally *tally = tally_of(to, request);
    if (!tally)
        return -1;
    Value *value = &to->opened.value;
    value->placed = value->duplicates = value->corrupt = value->foreign = 0;
    Py_BEGIN_ALLOW_THREADS
    sky_place_all(value, data, size, segment, (Py_ssize_t)((size - 1) / segment + 1));
    Py_END_ALLOW_THREADS
    tally->echo = be32(data + TELEMETRY_BYTES + TIMESTAMP_AT);
    tally->runs++;
    tally->placed += value->placed, tally->duplicates += value->duplicates;
    tally->corrupt += value->corrupt, tally->foreign += value->foreign;
    if (value->placed && !memchr(value->arrived, 0, value->chunks))
        to->complete = 1;
    return 1;
}

static PyObject *tallies_of(const Landings *to)
{
    PyObject *list = PyList_New(to->count);
    for (Py_ssize_t i = 0; list && i < to->count; i++) {
        const Tally *t = &to->tallies[i];
        PyObject *entry = Py_BuildValue("IInnnnn", (unsigned)t->request, (unsigned)t->echo, t->runs, t->placed,
                                        t->duplicates, t->corrupt, t->foreign);
        if (entry)
            PyList_SetItem(list, i, entry);
        else
            Py_CLEAR(list);
    }
    return list;
}

PyObject *sky_py_place_runs(PyObject *self, PyObject *args)
{
    PyObject *runs, *result = NULL;
    Py_ssize_t first;
    Landings to = {0};
    int placed = 1;
    if (!PyArg_ParseTuple(args, "O!nO!:place_runs", &PyList_Type, &runs, &first, &PyDict_Type, &to.awaited))
        return NULL;
    if (first < 0)
        return PyErr_Format(PyExc_ValueError, "first run %zd: expected 0 or more", first);
    PyObject *kept = PyList_AsTuple(runs); /* a number may be an object whose code changes the list */
    if (!kept)
        return NULL;
    for (Py_ssize_t i = first; placed == 1 && i < PyTuple_Size(kept); i++) {
        Py_buffer data;
        Py_ssize_t segment;
        PyObject *run = sky_tuple_at(kept, i, "runs: expected a list of tuples (data, segment bytes)");
        if (!run || !PyArg_ParseTuple(run, "y*n:run", &data, &segment)) {
            placed = -1;
        } else {
            placed = land(&to, data.buf, (size_t)data.len, segment);
            PyBuffer_Release(&data);
        }
    }
    if (placed >= 0)
        result = tallies_of(&to);
    close_landing(&to);
    free(to.tallies);
    Py_DECREF(kept);
    return result;
}

static int64_t now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

/* How long an empty socket is polled before the thread sleeps: longer than a small answer takes, shorter than a turn that
 * others wait for. Waking it takes as long as an answer on a quiet machine, and up to a tick (4 ms) on a busy one.
 * Where the last answer took long, others need the processor, and the thread sleeps at once. It never yields: since Linux
 * 6.17 who yields gets the processor back only after all others have had their turns. */
static atomic_int spin_us = MOST_SPIN_US;

/* Waits until runs arrive, the time is over or a signal comes; the number of runs, or -1 with errno. */
static int look(int fd, struct mmsghdr *messages, Control *controls, unsigned slots, Py_ssize_t patience_us)
{
    int64_t begin_us = 0, waited_us = 0;
    for (;;) {
        for (unsigned i = 0; i < slots; i++)
            messages[i].msg_hdr.msg_controllen = sizeof controls[i];
        int count = recvmmsg(fd, messages, slots, MSG_DONTWAIT, NULL);
        if (count > 0 && begin_us)
            spin_us = waited_us <= SOON_US ? MOST_SPIN_US : 0;
        if (count > 0 || (count < 0 && !sky_try_later(errno)))
            return count;
        if (patience_us <= 0)
            return 0;
        int64_t at_us = now_us();
        if (!begin_us)
            begin_us = at_us;
        waited_us = at_us - begin_us;
        if (waited_us >= patience_us) {
            if (waited_us > SOON_US)
                spin_us = 0;
            return 0;
        }
        if (waited_us < spin_us)
            continue;
        struct pollfd socket = {.fd = fd, .events = POLLIN};
        int64_t left_us = patience_us - waited_us;
        struct timespec most = {.tv_sec = left_us / 1000000, .tv_nsec = left_us % 1000000 * 1000};
        if (ppoll(&socket, 1, &most, NULL) < 0)
            return 0;
        waited_us = now_us() - begin_us;
    }
}

static int keep(PyObject *others, PyObject *scratch, Py_ssize_t start, Py_ssize_t size, Py_ssize_t segment)
{
    PyObject *from = PyLong_FromSsize_t(start), *to = PyLong_FromSsize_t(start + size);
    PyObject *slice = from && to ? PySlice_New(from, to, NULL) : NULL;
    PyObject *view = slice ? PyObject_GetItem(scratch, slice) : NULL;
    PyObject *run = view ? Py_BuildValue("On", view, segment) : NULL;
    int kept = run && PyList_Append(others, run) == 0;
    Py_XDECREF(run);
    Py_XDECREF(view);
    Py_XDECREF(slice);
    Py_XDECREF(to);
    Py_XDECREF(from);
    return kept ? 1 : -1;
}

/* Receive and place; runs that are not plain answers go to ``others``. 1, or -1 and an exception. */
static int receive(Landings *to, int fd, PyObject *scratch, uint8_t *room, unsigned slots, Py_ssize_t calls,
                   Py_ssize_t patience_us, PyObject *others)
{
    struct mmsghdr messages[MOST_SLOTS];
    struct iovec parts[MOST_SLOTS];
    Control controls[MOST_SLOTS];
    memset(messages, 0, slots * sizeof *messages);
    for (unsigned i = 0; i < slots; i++) {
        struct msghdr *header = &messages[i].msg_hdr;
        parts[i].iov_base = room + (size_t)i * SLOT_BYTES, parts[i].iov_len = SLOT_BYTES;
        header->msg_iov = &parts[i], header->msg_iovlen = 1;
        header->msg_control = &controls[i];
    }
    for (; calls > 0 && !to->complete && !PyList_Size(others); calls--) {
        int count;
        Py_BEGIN_ALLOW_THREADS
        count = look(fd, messages, controls, slots, patience_us);
        Py_END_ALLOW_THREADS
        if (count < 0 && !to->count) {
            PyErr_SetFromErrno(PyExc_OSError);
            return -1;
        }
        if (count <= 0)
            break;
        for (int i = 0, placed = 1; i < count; i++) {
            Py_ssize_t size = (Py_ssize_t)messages[i].msg_len, segment = sky_segment_of(&messages[i].msg_hdr, size);
            if (placed == 1)
                placed = land(to, parts[i].iov_base, (size_t)size, segment);
            if (placed == 0 && keep(others, scratch, (Py_ssize_t)i * SLOT_BYTES, size, segment) < 0)
                placed = -1;
            if (placed < 0)
                return -1;
        }
    }
    return 1;
}

PyObject *sky_py_recv_runs(PyObject *self, PyObject *args)
{
    int fd;
    PyObject *scratch, *others, *result = NULL;
    Py_buffer room;
    Py_ssize_t slots, calls, patience_us;
    Landings to = {0};
    if (!PyArg_ParseTuple(args, "iO!nnnO!:recv_runs", &fd, &PyMemoryView_Type, &scratch, &slots, &calls, &patience_us,
                          &PyDict_Type, &to.awaited) ||
        PyObject_GetBuffer(scratch, &room, PyBUF_WRITABLE) < 0)
        return NULL;
    if (slots < 1 || room.len / SLOT_BYTES < slots || calls < 1) {
        PyErr_Format(PyExc_ValueError, "%zd calls, %zd bytes of scratch for %zd slots: expected %d for each of 1 or more",
                     calls, room.len, slots, (int)SLOT_BYTES);
    } else if (patience_us > MOST_PATIENCE_US) {
        PyErr_Format(PyExc_ValueError, "%zd us of patience: expected at most %d", patience_us, (int)MOST_PATIENCE_US);
    } else if ((others = PyList_New(0)) != NULL) {
        unsigned most = (unsigned)(slots < MOST_SLOTS ? slots : MOST_SLOTS);
        if (receive(&to, fd, scratch, room.buf, most, calls, patience_us, others) > 0) {
            PyObject *tallies = tallies_of(&to);
            result = tallies ? PyTuple_Pack(2, tallies, others) : NULL;
            Py_XDECREF(tallies);
        }
        Py_DECREF(others);
    }
    close_landing(&to);
    free(to.tallies);
    PyBuffer_Release(&room);
    return result;
}
