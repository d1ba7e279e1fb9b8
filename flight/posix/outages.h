/* Which satellites are disabled: {"disabled": [[plane, slot], ...]}, as skymemory.testbed.control writes it. */
#ifndef SKY_POSIX_OUTAGES_H
#define SKY_POSIX_OUTAGES_H

#include <stdbool.h>

#include "satellite.h"

/* Calls `found` for each; false with a reason, where the file cannot be read or is none of these. No file: none. */
bool outages_read(const char *path, void (*found)(void *context, sky_link satellite), void *context, char reason[256]);

#endif
