/* A satellite's plain requests: serve.c receives them and answers GETs, take.c stores what SETs bring. */
#ifndef SKYMEMORY_SERVE_H
#define SKYMEMORY_SERVE_H

#include "answers.h"
#include "udp.h"

typedef struct {
    int fd, send_errors;
    const uint8_t *addresses; /* destination and source, as such requests bear them */
    PyObject *neighbours, *shares, *settled;
    PyObject *open, *first; /* borrowed, both NULL where packets carry no MACs */
    Py_ssize_t room_bytes;
    AnswerTerms terms;
    Inbox inbox;
    const uint8_t *scratch;
} Service;

static inline const uint8_t *sky_message(const Service *service, int at, size_t *size, size_t *segment)
{
    *size = service->inbox.messages[at].msg_len;
    *segment = (size_t)sky_segment_bytes(&service->inbox, at);
    return service->scratch + (size_t)at * SLOT_BYTES;
}

/* Chunks of one key that were stored. */
typedef struct {
    Py_ssize_t chunks, replaced, replaced_bytes, added_bytes;
} Taken;

/* Store the SETs that begin with message ``first``: how many messages these were; 0 where they are not plain, and
 * nothing has been done; -1 with an exception. *ack is the packet that says so, a new reference. */
int sky_take_sets(Service *service, int first, Taken *taken, PyObject **ack);

#endif
