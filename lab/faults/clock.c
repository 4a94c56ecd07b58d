/* Preloaded into the processes of one run: adds an offset to the wall clock that they see, and to
   nothing else. The offset, in seconds, is in a file that NYALA_CLOCK names; whoever writes there
   makes the clock jump. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *offset_s;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("NYALA_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *page = mmap(NULL, sizeof *offset_s, PROT_READ, MAP_SHARED, file, 0);
    if (page != MAP_FAILED) offset_s = page;
    close(file);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = (int)syscall(SYS_clock_gettime, clock, now);
    if (!failed && offset_s && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += *offset_s;
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &exact)) return -1;
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *place) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (place) *place = exact.tv_sec;
    return exact.tv_sec;
}
