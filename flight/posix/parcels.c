#include "parcels.h"

#include <stdlib.h>

void parcels_begin(parcel_queue *queue) {
    queue->first = NULL;
    queue->last = &queue->first;
    queue->bytes = 0;
}

void parcels_add(parcel_queue *queue, parcel *one) {
    one->next = NULL;
    *queue->last = one;
    queue->last = &one->next;
    queue->bytes += one->bytes;
}

parcel *parcels_take(parcel_queue *queue) {
    parcel *one = queue->first;
    if (one == NULL)
        return NULL;
    queue->first = one->next;
    if (queue->first == NULL)
        queue->last = &queue->first;
    queue->bytes -= one->bytes;
    return one;
}

static bool before(const held_parcel *a, const held_parcel *b) {
    return a->due != b->due ? a->due < b->due : a->order < b->order;
}

bool delay_hold(delay_line *line, parcel *one, sky_us due) {
    if (line->count == line->room) {
        const size_t room = line->room > 0 ? 2 * line->room : 256;
        held_parcel *larger = realloc(line->heap, room * sizeof *larger);
        if (larger == NULL) {
            free(one);
            return false;
        }
        line->heap = larger;
        line->room = room;
    }
    const held_parcel held = {due, line->order++, one};
    size_t at = line->count++;
    for (; at > 0 && before(&held, &line->heap[(at - 1) / 2]); at = (at - 1) / 2)
        line->heap[at] = line->heap[(at - 1) / 2];
    line->heap[at] = held;
    line->bytes += one->bytes;
    return true;
}

sky_us delay_next(const delay_line *line) {
    return line->count > 0 ? line->heap[0].due : SKY_NEVER;
}

parcel *delay_take(delay_line *line) {
    if (line->count == 0)
        return NULL;
    parcel *one = line->heap[0].its;
    const held_parcel last = line->heap[--line->count];
    size_t at = 0;
    for (size_t child = 1; child < line->count; child = 2 * at + 1) {
        if (child + 1 < line->count && before(&line->heap[child + 1], &line->heap[child]))
            child++;
        if (!before(&line->heap[child], &last))
            break;
        line->heap[at] = line->heap[child];
        at = child;
    }
    line->heap[at] = last;
    line->bytes -= one->bytes;
    return one;
}
