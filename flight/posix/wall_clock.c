#define _GNU_SOURCE
#include "wall_clock.h"

#include <time.h>

#define STEP_US 1000000 /* a wall clock further ahead than this was set; less is drift, and its correction */

static int64_t read_us(clockid_t which) {
    struct timespec at = {0, 0};
    (void)clock_gettime(which, &at);
    return (int64_t)at.tv_sec * 1000000 + at.tv_nsec / 1000;
}

int64_t running_us(void) {
    return read_us(CLOCK_BOOTTIME);
}

void wall_clock_begin(wall_clock *clock, int64_t unix_at_boot_us) {
    clock->offset_us = unix_at_boot_us != 0 ? unix_at_boot_us : read_us(CLOCK_REALTIME) - running_us();
}

int64_t wall_clock_now(const wall_clock *clock) {
    return running_us() + clock->offset_us;
}

int64_t wall_clock_shift(const wall_clock *clock) {
    const int64_t shift_us = read_us(CLOCK_REALTIME) - running_us() - clock->offset_us;
    return shift_us >= STEP_US || shift_us <= -STEP_US ? shift_us : 0;
}

bool wall_clock_follow(wall_clock *clock) {
    const int64_t offset_us = read_us(CLOCK_REALTIME) - running_us();
    if (offset_us - clock->offset_us < STEP_US)
        return false;
    clock->offset_us = offset_us;
    return true;
}
