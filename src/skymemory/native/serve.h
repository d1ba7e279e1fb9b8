/* A satellite's plain requests: serve.c receives them and answers GETs, take.c stores what SETs bring. */
#ifndef SKYMEMORY_SERVE_H
#define SKYMEMORY_SERVE_H

#include "answers.h"
#include "sha.h"
#include "udp.h"

typedef struct {
    int fd, send_errors;
    const uint8_t *addresses; /* destination and source, as such requests bear them */
    PyObject *neighbours, *shares, *settled;
    PyObject *first; /* borrowed, NULL where packets carry no MACs: called to check that authentic ones are new */
    MacCheck check;
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
 * nothing has been done; -1 with an exception. *ack is the acknowledgement, a new reference. */
/* Whether authentic packets with these sequence counts (a list, whose reference is taken), all sent at ``sent_us`` with
 * the headers of ``packet``, are new: -1 with an exception. */
int sky_is_first(const Service *service, const uint8_t *packet, long long sent_us, PyObject *sequences);
int sky_take_sets(Service *service, int first, Taken *taken, PyObject **ack);

#endif
