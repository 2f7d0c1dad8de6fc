/* Preloaded library that gives a process a wrong clock. It adds the seconds in the file SHIFTED_CLOCK to each time
   that the process reads. The file is mapped, so the clock can jump while the process runs. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static int64_t shift(void) {
    static const int64_t *mapped;
    if (!mapped) {
        const char *path = getenv("SHIFTED_CLOCK");
        int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
        if (file < 0) return 0;
        void *found = mmap(NULL, sizeof *mapped, PROT_READ, MAP_SHARED, file, 0);
        close(file);
        if (found == MAP_FAILED) return 0;
        mapped = found;
    }
    return *mapped;
}

int clock_gettime(clockid_t clock, struct timespec *told) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(clock, told);
    if (!code && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) told->tv_sec += shift();
    return code;
}

int gettimeofday(struct timeval *restrict told, void *restrict zone) {
    (void)zone;
    struct timespec at;
    int code = clock_gettime(CLOCK_REALTIME, &at);
    told->tv_sec = at.tv_sec;
    told->tv_usec = at.tv_nsec / 1000;
    return code;
}

time_t time(time_t *told) {
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    if (told) *told = at.tv_sec;
    return at.tv_sec;
}
