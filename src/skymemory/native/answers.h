/* What the answer to a request says beyond the request itself and the chunks: twin/runs.py's AnswerTerms. */
#ifndef SKYMEMORY_ANSWERS_H
#define SKYMEMORY_ANSWERS_H

#include "packet.h"

enum { ANSWER_PREFIX_BYTES = TELEMETRY_BYTES + SKY_BYTES };

typedef struct {
    int slot_moves, plane_moves;
    unsigned int credit, seconds, fraction, sequence;
} AnswerTerms;

/* Where PyArg_ParseTuple's "(iiIIII)" goes. */
#define SKY_TERMS(t) \
    &(t)->slot_moves, &(t)->plane_moves, &(t)->credit, &(t)->seconds, &(t)->fraction, &(t)->sequence

/* An answer up to the end of the SKY header; sequence count, length and checksum are for the caller to write. */
void sky_write_prefix(uint8_t *row, uint8_t op, const uint8_t *request, const AnswerTerms *terms);
/* (key, headers, payloads) for one sound GET, all of which is in the shares; NULL, mostly without an exception, if not. */
PyObject *sky_answer_plain_get(const uint8_t *packet, size_t size, PyObject *shares, const AnswerTerms *terms);

#endif
