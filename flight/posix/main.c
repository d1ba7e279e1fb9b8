/* skymemory-flight: serves a host's share of a constellation with satellites in C.
 *
 *     skymemory-flight satellite --host NAME --run-dir DIRECTORY --config FILE [--supervisor-fd N]
 *
 * Host and run directory are there for whoever looks for this process, as of the hosts in Python: the configuration says all.
 */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "crc.h" /* the native helper's */
#include "host.h"

static const char USAGE[] = "usage: skymemory-flight satellite --config FILE [--host NAME] [--run-dir DIRECTORY] "
                            "[--supervisor-fd N]\n`skymemory satellite --satellite c --write-config FILE` writes the file\n";

typedef struct {
    const char *config;
    int supervisor_fd; /* -1: none */
} request;

/* What is wrong with the command line; NULL: nothing. */
static const char *read_words(int count, char **words, request *asked) {
    if (count < 2 || strcmp(words[1], "satellite") != 0)
        return "expected `satellite` first";
    for (int i = 2; i < count; i += 2) {
        if (i + 1 == count)
            return "an option has no value";
        if (strcmp(words[i], "--config") == 0) {
            asked->config = words[i + 1];
        } else if (strcmp(words[i], "--supervisor-fd") == 0) {
            char *end = NULL;
            const long fd = strtol(words[i + 1], &end, 10);
            if (*words[i + 1] == '\0' || *end != '\0' || fd < 0 || fd > INT_MAX)
                return "--supervisor-fd: expected the number of an open socket";
            asked->supervisor_fd = (int)fd;
        } else if (strcmp(words[i], "--host") != 0 && strcmp(words[i], "--run-dir") != 0) {
            return "unknown option";
        }
    }
    return asked->config == NULL ? "expected --config FILE" : NULL;
}

int main(int count, char **words) {
    static share its;
    char reason[512] = "";
    request asked = {NULL, -1};
    if (count > 1 && strcmp(words[1], "--version") == 0) {
        (void)puts("skymemory-flight, wire format 1");
        return 0;
    }
    if (count > 1 && (strcmp(words[1], "--help") == 0 || strcmp(words[1], "-h") == 0)) {
        (void)fputs(USAGE, stdout);
        return 0;
    }
    const char *wrong = read_words(count, words, &asked);
    if (wrong != NULL) {
        (void)fprintf(stderr, "skymemory-flight: %s\n%s", wrong, USAGE);
        return 2;
    }
    sky_crc_init();
    if (!share_read(asked.config, &its, reason)) {
        (void)fprintf(stderr, "skymemory-flight: %s: %s\n", asked.config, reason);
        return 2;
    }
    return host_serve(&its, asked.supervisor_fd);
}
