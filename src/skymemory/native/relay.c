/* Packets in transit: whole runs pass with their hops counted where they lie. Twin and contract: twin/relay.py. */
#include "serve.h"

enum {
    JOURNEY_BYTES = 16, /* of the SKY header: version, operation, flags, status, both addresses, ground host */
    HOP_LIMIT_AT = 20,
    HOP_COUNT_AT = 21,
    BY_SLOT_LINK = 1u << 24, /* in the keys of routes: the axis of the link that packets came by */
    BY_PLANE_LINK = 2u << 24,
};

static size_t sky_start(const uint8_t *data)
{
    return data[0] & 0x10 ? COMMAND_BYTES : TELEMETRY_BYTES;
}

/* Whether every packet of a run has a whole SKY header. */
static int has_headers(const uint8_t *data, size_t size, size_t segment)
{
    if (!size || !segment)
        return 0;
    size_t least = sky_start(data) + SKY_BYTES, last = size % segment;
    return (size < segment ? size : segment) >= least && (!last || size < segment || last >= least);
}

static int same_journey(const uint8_t *data, size_t size, size_t segment)
{
    if (size <= segment)
        return 1;
    if (!has_headers(data, size, segment))
        return 0;
    size_t sky = sky_start(data);
    for (size_t at = segment; at < size; at += segment)
        if (data[at] != data[0] || memcmp(data + at + sky, data + sky, JOURNEY_BYTES))
            return 0;
    return 1;
}

static int may_go_on(const uint8_t *data, size_t size, size_t segment)
{
    for (size_t at = sky_start(data) + HOP_LIMIT_AT; at < size; at += segment)
        if (!data[at])
            return 0;
    return 1;
}

static void count_hops(uint8_t *data, size_t size, size_t segment)
{
    size_t sky = sky_start(data);
    for (size_t at = sky; at < size; at += segment)
        data[at + HOP_LIMIT_AT]--, data[at + HOP_COUNT_AT]++;
}

PyObject *sky_py_same_journey(PyObject *self, PyObject *args)
{
    Py_buffer data;
    Py_ssize_t segment;
    if (!PyArg_ParseTuple(args, "y*n:same_journey", &data, &segment))
        return NULL;
    PyObject *same = sky_count_segments(&data, segment) < 0
                         ? NULL
                         : PyBool_FromLong(same_journey(data.buf, (size_t)data.len, (size_t)segment));
    PyBuffer_Release(&data);
    return same;
}

PyObject *sky_py_count_hops(PyObject *self, PyObject *args)
{
    Py_buffer data;
    Py_ssize_t segment;
    PyObject *copy = NULL;
    if (!PyArg_ParseTuple(args, "y*n:count_hops", &data, &segment))
        return NULL;
    if (sky_count_segments(&data, segment) < 0)
        ;
    else if (!has_headers(data.buf, (size_t)data.len, (size_t)segment))
        PyErr_Format(PyExc_ValueError, "%zd bytes in packets of %zd: not all have whole headers", data.len, segment);
    else if (!may_go_on(data.buf, (size_t)data.len, (size_t)segment))
        copy = Py_NewRef(Py_None);
    else if ((copy = PyByteArray_FromStringAndSize(data.buf, data.len)) != NULL)
        count_hops((uint8_t *)PyByteArray_AsString(copy), (size_t)data.len, (size_t)segment);
    PyBuffer_Release(&data);
    return copy;
}

/* --- In service: runs that need no decision of the machine --- */

int sky_in_transit(const Service *service, int at)
{
    size_t size, segment;
    const uint8_t *data = sky_message(service, at, &size, &segment);
    return service->routes && has_headers(data, size, segment) &&
           memcmp(data + sky_start(data) + DESTINATION_AT, service->addresses, 4) && same_journey(data, size, segment);
}

static int all_sound(const uint8_t *data, size_t size, size_t segment)
{
    for (size_t at = 0, ref; at < size; at += segment) {
        size_t length = size - at < segment ? size - at : segment;
        if (sky_check_packet(data + at, length, &ref) != OK || (ref && !sky_payload_is_sound(data + at, length, ref)))
            return 0;
    }
    return 1;
}

/* What a table has, a new reference: 0 if nothing, -1 with an exception. */
static int find(PyObject *table, uint32_t name, PyObject **found)
{
    PyObject *key = PyLong_FromUnsignedLong(name);
    *found = key ? sky_dict_get(table, key) : NULL;
    Py_XDECREF(key);
    return *found ? 1 : PyErr_Occurred() ? -1 : 0;
}

static int address_of(PyObject *endpoint, Endpoint *to)
{
    const char *host;
    int port;
    if (!PyTuple_Check(endpoint)) {
        PyErr_SetString(PyExc_TypeError, "endpoints: expected (host, port) of each");
        return -1;
    }
    if (!PyArg_ParseTuple(endpoint, "si:endpoint", &host, &port))
        return -1;
    return sky_parse_host(host, port, to);
}

int sky_next_hop(const Service *service, uint32_t there, uint32_t came, PyObject **link, Endpoint *to)
{
    int found = service->routes ? find(service->routes, (there & 0xFFFFFF) | came, link) : 0;
    if (found != 1)
        return found;
    PyObject *endpoint = sky_dict_get(service->endpoints, *link);
    to->any.sa_family = 0;
    found = endpoint ? address_of(endpoint, to) : PyErr_Occurred() ? -1 : 1;
    Py_XDECREF(endpoint);
    if (found != 1)
        Py_CLEAR(*link);
    return found;
}

/* Which of our links leads to ``source``, as the keys of routes say it; -1 with an exception. */
static long came_by(const Service *service, PyObject *source)
{
    if (!source)
        return 0;
    if (!PyTuple_Check(source) || !PyTuple_Size(source)) {
        PyErr_SetString(PyExc_TypeError, "neighbours: expected (plane, slot) of each");
        return -1;
    }
    long plane = PyLong_AsLong(PyTuple_GetItem(source, 0));
    if (plane == -1 && PyErr_Occurred())
        return -1;
    return plane == (long)(be32(service->addresses) >> 12 & 0xFFF) ? BY_SLOT_LINK : BY_PLANE_LINK;
}

/* Let a run pass by the link that is known for it. */
static int pass_by(Service *service, int at, PyObject *endpoint, PyObject *source, PyObject *link, int hop, Whole run)
{
    size_t size, segment;
    uint8_t *data = sky_message(service, at, &size, &segment);
    const uint8_t *sky = data + sky_start(data);
    uint32_t ground = be32(sky + GROUND_HOST_AT);
    if (hop && !may_go_on(data, size, segment))
        return 0;
    if (!source) { /* what comes from the ground is verified where it enters */
        if (!(data[0] & 0x10) || !all_sound(data, size, segment))
            return 0;
        if (service->first) {
            int admitted = memcmp(sky + SOURCE_AT, service->addresses + 4, 4) ? 0 : sky_is_admitted(service, at, 1);
            if (admitted != 1)
                return admitted;
        }
    }
    if (!service->passing) {
        service->passing = sky_realloc(NULL, (size_t)service->count, sizeof *service->passing);
        service->wholes = sky_realloc(NULL, (size_t)service->count, sizeof *service->wholes);
        if (!service->passing || !service->wholes)
            return PyErr_NoMemory(), -1;
    }
    if (hop)
        count_hops(data, size, segment);
    service->wholes[service->passings] = run;
    service->passing[service->passings++] =
        (Passing){Py_NewRef(source ? source : endpoint), Py_NewRef(link), ground};
    return 1;
}

int sky_pass(Service *service, int at, PyObject *endpoint, PyObject *source)
{
    size_t size, segment;
    const uint8_t *data = sky_message(service, at, &size, &segment), *sky = data + sky_start(data);
    uint32_t there = be32(sky + DESTINATION_AT), ground = be32(sky + GROUND_HOST_AT);
    Whole run = {.data = (const char *)data, .size = size, .segment = segment};
    PyObject *link = NULL;
    int hop = (there ^ be32(service->addresses)) & 0xFFFFFF, found; /* a beam is no link between satellites */
    if (hop) {
        long came = came_by(service, source);
        found = came < 0 ? -1 : sky_next_hop(service, there, (uint32_t)came, &link, &run.to);
    } else {
        found = there >> 24 == GROUND_SHELL ? find(service->grounds, ground, &link) : 0;
        if (found == 1 && !(found = address_of(link, &run.to))) /* no socket's: the caller hands over what goes there */
            run.to.any.sa_family = 0, found = 1;
    }
    if (found == 1)
        found = pass_by(service, at, endpoint, source, link, hop, run);
    Py_XDECREF(link);
    return found;
}

static int same_way(const Passing *one, const Passing *other)
{
    if (one->ground != other->ground)
        return 0;
    int same = PyObject_RichCompareBool(one->link, other->link, Py_EQ);
    return same == 1 ? PyObject_RichCompareBool(one->source, other->source, Py_EQ) : same;
}

/* (offset, size, segment) of what was not sent of each run of this way; -1 with an exception, else the packets of all. */
static Py_ssize_t add_left(const Service *service, int first, PyObject *left)
{
    Py_ssize_t packets = 0;
    for (int i = first; i < service->passings; i++) {
        const Whole *run = &service->wholes[i];
        int same = i == first ? 1 : same_way(&service->passing[first], &service->passing[i]);
        if (same < 0)
            return -1;
        if (!same)
            continue;
        packets += (Py_ssize_t)sky_whole_packets(run);
        size_t sent = run->sent * run->segment;
        if (sent >= run->size)
            continue;
        PyObject *rest = Py_BuildValue("nnn", (Py_ssize_t)((const uint8_t *)run->data - service->scratch + (Py_ssize_t)sent),
                                       (Py_ssize_t)(run->size - sent), (Py_ssize_t)run->segment);
        if (!rest || PyList_Append(left, rest) < 0)
            packets = -1;
        Py_XDECREF(rest);
        if (packets < 0)
            return -1;
    }
    return packets;
}

/* Whether an earlier run went the same way; -1 with an exception. */
static int is_reported(const Service *service, int at)
{
    int same = 0;
    for (int i = 0; i < at && !same; i++)
        same = same_way(&service->passing[i], &service->passing[at]);
    return same;
}

PyObject *sky_send_passing(Service *service)
{
    int reported = 0;
    if (service->passings) {
        Py_BEGIN_ALLOW_THREADS
        service->send_errors += sky_send_wholes(service->fd, service->wholes, (size_t)service->passings);
        Py_END_ALLOW_THREADS
    }
    PyObject *passed = PyList_New(0);
    for (int i = 0; passed && reported >= 0 && i < service->passings; i++) {
        reported = is_reported(service, i);
        if (reported)
            continue;
        const Passing *one = &service->passing[i];
        PyObject *left = PyList_New(0);
        Py_ssize_t packets = left ? add_left(service, i, left) : -1;
        PyObject *entry = packets < 0 ? NULL
                                      : Py_BuildValue("OIOnO", one->source, (unsigned)one->ground, one->link, packets, left);
        if (!entry || PyList_Append(passed, entry) < 0)
            reported = -1;
        Py_XDECREF(entry);
        Py_XDECREF(left);
    }
    if (reported < 0)
        Py_CLEAR(passed);
    return passed;
}

void sky_passing_free(Service *service)
{
    for (int i = 0; i < service->passings; i++) {
        Py_DECREF(service->passing[i].source);
        Py_DECREF(service->passing[i].link);
    }
    free(service->passing);
    free(service->wholes);
}
