/* A satellite's plain requests, received, answered and sent in one call. Twin and contract: twin/runs.py. */
#include "serve.h"

#include <errno.h>
#include <limits.h>

enum {
    ADDRESSES_AT = COMMAND_BYTES + 4,
    ADDRESSES_BYTES = 8,
    GROUND_AT = COMMAND_BYTES + 12,
    SOME_PAYLOADS = 128,
};

/* Send headers (a bytearray) and payloads (a list of bytes, or NULL): returns what the kernel did not take as (headers,
 * payloads or None), None if it took all; NULL with an exception. All is returned where ``to`` has no endpoint. */
static PyObject *send_answer(Service *service, Endpoint *to, PyObject *headers, PyObject *payloads)
{
    Py_ssize_t count = payloads ? PyList_Size(payloads) : 1;
    if (!to->any.sa_family)
        return PyTuple_Pack(2, headers, payloads ? payloads : Py_None);
    Py_buffer some[SOME_PAYLOADS], *held = count <= SOME_PAYLOADS ? some : sky_realloc(NULL, (size_t)count, sizeof *held);
    if (!held)
        return PyErr_NoMemory();
    for (Py_ssize_t i = 0; payloads && i < count; i++) { /* the list keeps the bytes, they are never changed */
        held[i].buf = PyBytes_AsString(PyList_GetItem(payloads, i));
        held[i].len = PyBytes_Size(PyList_GetItem(payloads, i));
    }
    size_t bytes = (size_t)PyByteArray_Size(headers), width = bytes / (size_t)count, sent;
    Outgoing out = {PyByteArray_AsString(headers), bytes, width, payloads ? held : NULL, (size_t)count};
    int error;
    Py_BEGIN_ALLOW_THREADS
    sent = sky_send_all(service->fd, to, &out, &error);
    Py_END_ALLOW_THREADS
    if (held != some)
        free(held);
    if (error && !sent && !sky_try_later(error)) {
        service->send_errors++; /* the network refused it: lost, and requested again */
        Py_RETURN_NONE;
    }
    if (sent == (size_t)count)
        Py_RETURN_NONE;
    PyObject *rest = PySequence_GetSlice(headers, (Py_ssize_t)(sent * width), (Py_ssize_t)bytes);
    PyObject *unsent = payloads ? PyList_GetSlice(payloads, (Py_ssize_t)sent, count) : Py_NewRef(Py_None);
    PyObject *pair = rest && unsent ? PyTuple_Pack(2, rest, unsent) : NULL;
    Py_XDECREF(rest);
    Py_XDECREF(unsent);
    return pair;
}

/* The answer to a GET with a MAC, if that is authentic and new; like ``sky_answer_plain_get``. */
static PyObject *answer_authentic_get(Service *service, const uint8_t *packet, size_t size)
{
    long long sent_us;
    if (sky_check_mac(&service->check, packet, size, COMMAND_BYTES, &sent_us) != 1)
        return NULL;
    uint8_t *plain = PyMem_Malloc(size);
    if (!plain)
        return PyErr_NoMemory();
    sky_strip_mac(packet, size, COMMAND_BYTES, size, plain);
    PyObject *answer = sky_answer_plain_get(plain, size - MAC_BYTES, service->shares, &service->terms);
    PyMem_Free(plain);
    if (answer) { /* only now: a packet that is not answered here is processed again, and must then be new */
        PyObject *sequences = Py_BuildValue("[i]", (int)(be16(packet + 2) & 0x3FFF));
        if (sky_is_first(service, packet, sent_us, sequences) != 1)
            Py_CLEAR(answer);
    }
    return answer;
}

/* The answer to a single GET, like ``sky_answer_plain_get``. */
static PyObject *answer_get(Service *service, const uint8_t *packet, size_t size)
{
    return service->first ? answer_authentic_get(service, packet, size)
                          : sky_answer_plain_get(packet, size, service->shares, &service->terms);
}

/* Serve the request that begins with message ``at`` and comes by the link ``source``; the answer leaves by ``link``, which
 * leads to ``to``. How many messages it took, 0 where it is not plain, -1 with an exception. */
static int serve(Service *service, int at, PyObject *source, PyObject *link, Endpoint *to, PyObject *served)
{
    size_t size, segment;
    const uint8_t *packet = sky_message(service, at, &size, &segment);
    uint8_t op = packet[COMMAND_BYTES + 1];
    PyObject *headers = NULL, *payloads = NULL, *answer = NULL;
    Taken taken = {0};
    int messages = 0, packets = 1;
    if (op == OP_GET && segment >= size) {
        answer = answer_get(service, packet, size);
        if (answer) {
            headers = Py_NewRef(PyTuple_GetItem(answer, 1));
            payloads = PyTuple_GetItem(answer, 2);
            taken.chunks = PyList_Size(payloads);
            packets = (int)taken.chunks, messages = 1;
        }
    } else if (op == OP_SET) {
        messages = sky_take_sets(service, at, &taken, &headers);
    }
    if (messages > 0) {
        const char *key = (const char *)packet + COMMAND_BYTES + SKY_BYTES; /* a selection and a reference begin with it */
        PyObject *rest = send_answer(service, to, headers, payloads);
        PyObject *entry = rest ? Py_BuildValue("iy#IOOnnnnN", (int)op, key, (Py_ssize_t)KEY_BYTES,
                                               (unsigned)be32(packet + GROUND_AT), source, link, taken.chunks,
                                               taken.replaced, taken.replaced_bytes, taken.added_bytes, rest)
                               : NULL;
        service->terms.sequence += (unsigned)packets;
        if (!entry || PyList_Append(served, entry) < 0)
            messages = -1;
        Py_XDECREF(entry);
    }
    Py_XDECREF(headers);
    Py_XDECREF(answer);
    return PyErr_Occurred() ? -1 : messages;
}

/* Serve a request of a ground host, by our own beam or by the link to the satellite ``neighbour``. */
static int serve_if_known(Service *service, int at, PyObject *endpoint, PyObject *neighbour, PyObject *served)
{
    size_t size, segment;
    const uint8_t *source = sky_message(service, at, &size, &segment) + COMMAND_BYTES + SOURCE_AT;
    int our_beam = !memcmp(source, service->addresses + 4, 4), found;
    Endpoint to = {0}, *from = service->messages[at].from;
    PyObject *link = NULL;
    if (!neighbour)
        return our_beam ? serve(service, at, endpoint, endpoint, from ? from : &to, served) : 0;
    if (our_beam || *source != GROUND_SHELL)
        return 0;
    found = sky_next_hop(service, be32(source), 0, &link, &to);
    if (found == 1)
        found = serve(service, at, neighbour, link, &to, served);
    Py_XDECREF(link);
    return found;
}

/* Serve or pass on message ``at``, which came from ``host`` or, if that is NULL, was handed over by ``source``, a satellite
 * or (named by text) a ground host: how many messages it took, 0 if it is to be kept; -1 with an exception. ``plain``: none was kept before. */
static int handle(Service *service, int at, int plain, PyObject *host, PyObject *source, PyObject *served)
{
    size_t size, segment;
    const uint8_t *packet = sky_message(service, at, &size, &segment);
    int ours = size >= GROUND_AT + 4 && packet[0] & 0x10 && !memcmp(packet + ADDRESSES_AT, service->addresses, 4);
    int passes = !ours && sky_in_transit(service, at), messages = 0;
    PyObject *endpoint = NULL;
    if (!(ours && plain) && !passes)
        return 0;
    if (host) {
        endpoint = Py_BuildValue("(Oi)", host, sky_port(service->messages[at].from));
        source = endpoint ? sky_dict_get(service->neighbours, endpoint) : NULL;
    } else if (PyTuple_Size(source) && PyUnicode_Check(PyTuple_GetItem(source, 0))) {
        endpoint = Py_NewRef(source);
        source = NULL;
    } else {
        Py_INCREF(source);
    }
    if (!PyErr_Occurred())
        messages = passes ? sky_pass(service, at, endpoint, source) : serve_if_known(service, at, endpoint, source, served);
    Py_XDECREF(source);
    Py_XDECREF(endpoint);
    return PyErr_Occurred() ? -1 : messages;
}

/* The plain requests and the transit, common to both calls; 0 with an exception. */
static int read_terms(Service *service, PyObject *requests, PyObject *transit, Py_buffer *addresses)
{
    PyObject *guard;
    if (!PyArg_ParseTuple(requests, "y*O!O!n(iiIIII)O:requests", addresses, &PyDict_Type, &service->shares, &PySet_Type,
                          &service->settled, &service->room_bytes, SKY_TERMS(&service->terms), &guard))
        return 0;
    if (addresses->len != ADDRESSES_BYTES) {
        PyErr_Format(PyExc_ValueError, "addresses of %zd bytes: expected %d", addresses->len, (int)ADDRESSES_BYTES);
        return 0;
    }
    if ((guard != Py_None && !PyTuple_Check(guard)) || (transit != Py_None && !PyTuple_Check(transit))) {
        PyErr_SetString(PyExc_TypeError, "guard and transit: expected None or a tuple");
        return 0;
    }
    service->addresses = addresses->buf;
    return (guard == Py_None ||
            PyArg_ParseTuple(guard, "O!LLOI:guard", &PyDict_Type, &service->check.keys, &service->check.now_us,
                             &service->check.skew_us, &service->first, &service->signer)) &&
           (transit == Py_None || PyArg_ParseTuple(transit, "O!O!O!:transit", &PyDict_Type, &service->routes, &PyDict_Type,
                                                   &service->grounds, &PyDict_Type, &service->endpoints));
}

/* Serve the messages, which ``arrivals`` (a tuple of tuples; of ``source`` NULL, the fourth item of each is the host)
 * describe: the result of the call. */
static PyObject *serve_all(Service *service, PyObject *arrivals, PyObject *source)
{
    PyObject *kept = PyList_New(0), *served = PyList_New(0), *passed = NULL, *result = NULL;
    int messages = kept && served ? 0 : -1, plain = 1;
    if (service->first && !sky_sha_ready()) /* MACs cannot be checked here: the machine gets everything */
        service->routes = NULL, plain = 0;
    for (int at = 0; messages >= 0 && at < service->count; at += messages > 0 ? messages : 1) {
        PyObject *arrival = PyTuple_GetItem(arrivals, at);
        messages = handle(service, at, plain, source ? NULL : PyTuple_GetItem(arrival, 3), source, served);
        if (!messages) {
            plain = 0;
            messages = PyList_Append(kept, arrival);
        }
    }
    if (messages >= 0)
        passed = sky_send_passing(service);
    if (passed)
        result = Py_BuildValue("OOiO", kept, served, service->send_errors, passed);
    sky_passing_free(service);
    Py_XDECREF(passed);
    Py_XDECREF(served);
    Py_XDECREF(kept);
    return result;
}

PyObject *sky_py_serve(PyObject *self, PyObject *args)
{
    Py_buffer scratch, addresses = {0};
    Py_ssize_t slots;
    PyObject *requests, *transit = Py_None, *list = NULL, *arrivals = NULL, *result = NULL;
    Service service = {0};
    Inbox inbox = {0};
    if (!PyArg_ParseTuple(args, "iw*nO!O!|O:serve", &service.fd, &scratch, &slots, &PyDict_Type, &service.neighbours,
                          &PyTuple_Type, &requests, &transit))
        return NULL;
    if (read_terms(&service, requests, transit, &addresses) && sky_receive(service.fd, &scratch, slots, &inbox) == 0 &&
        (list = sky_arrivals(&inbox)) != NULL && (arrivals = PyList_AsTuple(list)) != NULL) {
        service.scratch = scratch.buf;
        service.messages = sky_realloc(NULL, (size_t)inbox.count, sizeof *service.messages);
        service.count = service.messages ? inbox.count : 0;
        for (int i = 0; i < service.count; i++)
            service.messages[i] = (Message){(uint8_t *)scratch.buf + (size_t)i * SLOT_BYTES, inbox.messages[i].msg_len,
                                            (size_t)sky_segment_bytes(&inbox, i), &inbox.from[i]};
        result = service.messages ? serve_all(&service, arrivals, NULL) : PyErr_NoMemory();
        free(service.messages);
    }
    Py_XDECREF(arrivals);
    Py_XDECREF(list);
    sky_inbox_free(&inbox);
    PyBuffer_Release(&addresses);
    PyBuffer_Release(&scratch);
    return result;
}

PyObject *sky_py_serve_runs(PyObject *self, PyObject *args)
{
    Py_buffer scratch, addresses = {0};
    PyObject *runs, *source, *requests, *transit = Py_None, *result = NULL;
    Service service = {0};
    if (!PyArg_ParseTuple(args, "iw*O!O!O!|O:serve_runs", &service.fd, &scratch, &PyList_Type, &runs, &PyTuple_Type, &source,
                          &PyTuple_Type, &requests, &transit))
        return NULL;
    int right = read_terms(&service, requests, transit, &addresses);
    PyObject *kept = right ? PyList_AsTuple(runs) : NULL; /* the guard, and numbers, may run code that changes the list */
    Py_ssize_t count = kept ? PyTuple_Size(kept) : 0;
    service.scratch = scratch.buf;
    service.messages = kept && count <= INT_MAX ? sky_realloc(NULL, (size_t)count, sizeof *service.messages) : NULL;
    if (right && !service.messages)
        right = 0, PyErr_NoMemory();
    for (Py_ssize_t i = 0; right && i < count; i++) {
        Py_ssize_t at, size, segment;
        PyObject *run = sky_tuple_at(kept, i, "runs: expected tuples (offset, bytes, segment bytes)");
        right = run && PyArg_ParseTuple(run, "nnn:run", &at, &size, &segment);
        if (right && (at < 0 || size < 1 || segment < 1 || size > scratch.len || at > scratch.len - size))
            right = 0, PyErr_Format(PyExc_ValueError, "a run of %zd bytes at %zd, in packets of %zd", size, at, segment);
        else if (right)
            service.messages[i] = (Message){(uint8_t *)scratch.buf + at, (size_t)size, (size_t)segment, NULL};
    }
    service.count = (int)count;
    if (right)
        result = serve_all(&service, kept, source);
    free(service.messages);
    Py_XDECREF(kept);
    PyBuffer_Release(&addresses);
    PyBuffer_Release(&scratch);
    return result;
}
