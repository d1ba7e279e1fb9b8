/* Clocks of a computer that has slept, for the daemon of satellites in C: loaded before the C library (LD_PRELOAD).
 *
 * $SKYMEMORY_SLEPT names the file of slept_host.py. What it says is added to the wall clock and to the clock that counts
 * time asleep. A timer that was armed before the sleep fires late by it; the daemon arms its own ten times a second.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#define SECOND_NS 1000000000LL

static volatile const double *slept;

__attribute__((constructor)) static void look(void) {
    const char *path = getenv("SKYMEMORY_SLEPT");
    const int fd = path != NULL ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *view = fd >= 0 ? mmap(NULL, sizeof *slept, PROT_READ, MAP_SHARED, fd, 0) : MAP_FAILED;
    if (view == MAP_FAILED)
        abort();
    slept = view;
    (void)close(fd);
}

static struct timespec later(struct timespec at, double seconds) {
    long long ns = at.tv_sec * SECOND_NS + at.tv_nsec + (long long)(seconds * (double)SECOND_NS);
    ns = ns > 0 ? ns : 1; /* 0 would disarm a timer */
    return (struct timespec){(time_t)(ns / SECOND_NS), (long)(ns % SECOND_NS)};
}

int clock_gettime(clockid_t which, struct timespec *at) {
    const long failed = syscall(SYS_clock_gettime, which, at);
    if (failed == 0 && (which == CLOCK_REALTIME || which == CLOCK_BOOTTIME))
        *at = later(*at, *slept);
    return (int)failed;
}

int timerfd_settime(int fd, int flags, const struct itimerspec *new, struct itimerspec *old) {
    struct itimerspec its = *new;
    if (flags & TFD_TIMER_ABSTIME && (its.it_value.tv_sec != 0 || its.it_value.tv_nsec != 0))
        its.it_value = later(its.it_value, -*slept);
    return (int)syscall(SYS_timerfd_settime, fd, flags, &its, old);
}
