/* A wall clock that can be set, for one process and what it becomes: loaded before the C library (LD_PRELOAD).
 *
 * The folder $SKYMEMORY_WALL has a file for each host, named as its `--host`, and `all` for every other process: a double, the
 * seconds that the wall clock is ahead. No other clock changes.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static volatile const double *ahead;

static const char *host_of(char *words, ssize_t bytes) {
    const char *found = "all";
    for (char *at = words; at < words + bytes; at += strlen(at) + 1) {
        if (strcmp(at, "--host") == 0 && at + 7 < words + bytes)
            found = at + 7;
    }
    return found;
}

__attribute__((constructor)) static void look(void) {
    static char words[65536];
    char path[4096];
    const char *folder = getenv("SKYMEMORY_WALL");
    const int command = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
    const ssize_t bytes = command < 0 ? 0 : read(command, words, sizeof words - 1);
    if (command >= 0)
        (void)close(command);
    if (folder == NULL || snprintf(path, sizeof path, "%s/%s", folder, host_of(words, bytes)) >= (int)sizeof path)
        abort();
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    void *view = fd >= 0 ? mmap(NULL, sizeof *ahead, PROT_READ, MAP_SHARED, fd, 0) : MAP_FAILED;
    if (view == MAP_FAILED)
        abort();
    ahead = view;
    (void)close(fd);
}

int clock_gettime(clockid_t which, struct timespec *at) {
    const long failed = syscall(SYS_clock_gettime, which, at);
    if (failed == 0 && which == CLOCK_REALTIME && ahead != NULL)
        at->tv_sec += (time_t)*ahead;
    return (int)failed;
}
