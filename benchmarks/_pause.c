/* A thread that stamps a monotonic clock in a tight loop and keeps the longest gap.
 *
 * Whatever stops the thread makes a gap. So does another process that has the core: the time that
 * the thread could run but had to queue (schedstat, run_delay) is taken off, which leaves what it
 * was not allowed to run. What a hypervisor takes is not told and stays in.
 */
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define SHORT 50000     /* ns; a stamp takes 0.05 µs, a reading of schedstat 1 µs */
#define REFRESH 1000000 /* ns after which short waits are taken note of */

struct meter {
    uint64_t longest; /* ns; whoever reads it may set it back to 0 */
    uint64_t stamps;
};

static uint64_t now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (uint64_t)at.tv_sec * 1000000000u + (uint64_t)at.tv_nsec;
}

static uint64_t queued(int fd) {
    char text[96] = "";
    unsigned long long ran = 0, waited = 0;
    if (pread(fd, text, sizeof text - 1, 0) > 0) sscanf(text, "%llu %llu", &ran, &waited);
    return waited;
}

static void *stamp(void *given) {
    volatile struct meter *meter = given;
    int fd = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
    uint64_t waited = queued(fd), last = now(), refreshed = last;
    for (;;) {
        uint64_t at = now(), gap = at - last;
        if (gap > SHORT || at - refreshed > REFRESH) {
            uint64_t sum = queued(fd), queue = sum - waited;
            waited = sum;
            gap = gap > queue ? gap - queue : 0;
            if (gap > meter->longest) meter->longest = gap;
            at = refreshed = now();
        }
        meter->stamps++;
        last = at;
    }
    return NULL;
}

/* Start the thread; its results lie in the file, which has the size of a page. */
int start_meter(const char *path) {
    pthread_t thread;
    int fd = open(path, O_RDWR | O_CLOEXEC);
    void *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd < 0 || page == MAP_FAILED) return -1;
    close(fd);
    return pthread_create(&thread, NULL, stamp, page);
}
