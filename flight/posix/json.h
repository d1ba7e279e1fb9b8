/* As much JSON as the project's small files have: objects, arrays, strings without escapes, numbers. A cursor, no tree. */
#ifndef SKY_POSIX_JSON_H
#define SKY_POSIX_JSON_H

#include <stdbool.h>
#include <stddef.h>

typedef struct {
    const char *at, *end;
    bool failed; /* sticky: after it everything reads as nothing */
} json;

/* Whether this character comes next, which is then behind us. */
bool json_take(json *text, char wanted);
/* A string of at most `room` - 1 characters. */
void json_string(json *text, char *value, size_t room);
double json_number(json *text);
/* A whole number of 0 to `most`. */
long json_whole(json *text, long most);
/* Nothing but white space is left. */
bool json_ended(json *text);

/* Reads a whole file of at most `room` bytes; how many, or -1 with errno (EFBIG: longer). `private_only`: refuses, by
 * EPERM, one that others may read. */
long json_read_file(const char *path, char *data, size_t room, bool private_only);

#endif
