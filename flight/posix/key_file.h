/* The ring of keys in a file, as skymemory.testbed.key_file writes it; followed when it changes. */
#ifndef SKY_POSIX_KEY_FILE_H
#define SKY_POSIX_KEY_FILE_H

#include <stdbool.h>
#include <sys/types.h>
#include <time.h>

#include "config.h"

/* Reads the ring; false with a reason, which contains no secret. */
bool key_file_read(const char *path, sky_auth auth, sky_ring *ring, char reason[256]);

/* What a file looked like. */
typedef struct {
    time_t seconds;
    long nanoseconds;
    ino_t inode;
    off_t bytes;
} file_state;

/* Whether the file looks different from before. */
bool file_changed(const char *path, file_state *seen);

#endif
