/* A satellite's plain requests: serve.c receives them and answers GETs, take.c stores what SETs bring, relay.c passes on
 * what is for others. */
#ifndef SKYMEMORY_SERVE_H
#define SKYMEMORY_SERVE_H

#include "answers.h"
#include "sha.h"
#include "udp.h"

/* A run that passes: the ends of the links that it came by and leaves by, and the ground host that it concerns. */
typedef struct {
    PyObject *source, *link;
    uint32_t ground;
} Passing;

/* A run, as it arrived. ``from`` is NULL where it was handed over in memory. */
typedef struct {
    uint8_t *data;
    size_t size, segment;
    Endpoint *from;
} Message;

typedef struct {
    int fd, send_errors;
    const uint8_t *addresses; /* destination and source, as such requests bear them */
    PyObject *neighbours, *shares, *settled;
    PyObject *routes, *grounds, *endpoints; /* of the call's arguments, NULL where nothing may pass */
    PyObject *first; /* of the call's arguments, NULL where packets carry no MACs: called to check that authentic ones are new */
    MacCheck check;
    unsigned signer; /* the id of the key that ACKs are signed by; 0: they carry no MACs */
    Py_ssize_t room_bytes;
    AnswerTerms terms;
    Message *messages;
    int count;
    const uint8_t *scratch; /* in which all messages lie */
    int passings; /* of these arrays, NULL before the first */
    Passing *passing;
    Whole *wholes;
} Service;

static inline uint8_t *sky_message(const Service *service, int at, size_t *size, size_t *segment)
{
    *size = service->messages[at].size;
    *segment = service->messages[at].segment;
    return service->messages[at].data;
}

/* Chunks of one key that were stored. */
typedef struct {
    Py_ssize_t chunks, replaced, replaced_bytes, added_bytes;
} Taken;

/* Store the SETs that begin with message ``first``: how many messages these were; 0 where they are not plain, and
 * nothing has been done; -1 with an exception. *ack is the acknowledgement, a new reference. */
/* Whether authentic packets with these sequence counts (a list, whose reference is taken), all sent at ``sent_us`` with
 * the headers of ``packet``, are new: -1 with an exception. */
int sky_is_first(const Service *service, const uint8_t *packet, long long sent_us, PyObject *sequences);
int sky_take_sets(Service *service, int first, Taken *taken, PyObject **ack);
/* Whether all packets of these messages are authentic, of one sender and one moment, and new: then that is recorded. If
 * not, nothing is. -1 with an exception. */
int sky_is_admitted(Service *service, int first, int messages);

/* The link towards a satellite, a new reference, and where it leads: 0 where no route is known, -1 with an exception. The
 * family of *to is 0 where that has no endpoint: then the caller hands over what goes there. ``came``: 0, or the axis of the
 * link that the packet came by, as in the keys of routes. */
int sky_next_hop(const Service *service, uint32_t there, uint32_t came, PyObject **link, Endpoint *to);
/* Whether the message is a run of one journey that ends elsewhere. */
int sky_in_transit(const Service *service, int at);
/* Let it pass with its hops counted, if a route is known: 0 if not, and nothing has been done; -1 with an exception.
 * ``source``: the satellite that it came from, NULL if from the ground. */
int sky_pass(Service *service, int at, PyObject *endpoint, PyObject *source);
/* Send all that may pass: a list as ``serve`` returns it. */
PyObject *sky_send_passing(Service *service);
void sky_passing_free(Service *service);

#endif
