/* skymemory-flight: serves a host's share of a constellation with satellites in C.
 *
 *     skymemory-flight satellite --host NAME --run-dir DIRECTORY --config FILE [--supervisor-fd N]
 *
 * Host and run directory are there for whoever looks for this process, as of the hosts in Python: the configuration says all.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "crc.h" /* the native helper's */
#include "host.h"

static const char *option(int count, char **words, const char *name) {
    for (int i = 1; i + 1 < count; i++) {
        if (strcmp(words[i], name) == 0)
            return words[i + 1];
    }
    return NULL;
}

int main(int count, char **words) {
    static share its;
    char reason[512] = "";
    const char *config = option(count, words, "--config");
    const char *line = option(count, words, "--supervisor-fd");
    if (count > 1 && strcmp(words[1], "--version") == 0) {
        (void)puts("skymemory-flight, wire format 1");
        return 0;
    }
    sky_crc_init();
    if (config == NULL) {
        (void)fprintf(stderr, "usage: skymemory-flight satellite --config FILE [--supervisor-fd N]; `skymemory satellite "
                              "--satellite c` writes the file and starts it\n");
        return 2;
    }
    if (!share_read(config, &its, reason)) {
        (void)fprintf(stderr, "skymemory-flight: %s: %s\n", config, reason);
        return 2;
    }
    return host_serve(&its, line != NULL ? atoi(line) : -1);
}
