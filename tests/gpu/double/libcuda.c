/* A double of libcuda.so.1: the part of the driver API that kvlake calls, without a device.
 *
 * Device memory is a memfd. It is mapped twice: once without access, at the address that callers
 * get (a CPU that follows a device pointer dies, as beside a real one), and once for the double
 * itself. An IPC handle names the memfd of another process; a VMM handle is exported as the memfd.
 *
 * A stream is a thread with a queue. Nothing runs in the call that asked for it; streams run side
 * by side, and the copies of one batch, and the pieces of one copy, run in any order. The control
 * page (double.h) adds delays, holds and errors, and keeps a ledger of what lives.
 *
 * Broken rules of the driver are counted as violations, whatever the call returns: freeing or
 * unregistering memory that queued work touches, a batch on the NULL stream, a copy that leaves its
 * allocation or straddles two registrations, a device that uses host memory which another one
 * registered without PORTABLE, and a device pointer of host memory without DEVICEMAP.
 *
 * It proves logic and ABI, never speed. With a clock (`clock_mb_per_s`) it says what part of its time a
 * copy engine of that rate would be busy. */
#define _GNU_SOURCE
#include "double.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct context *CUcontext;
typedef struct stream *CUstream;
typedef struct event *CUevent;

enum {
    SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201, ALREADY_MAPPED = 208, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600,
    ALREADY_REGISTERED = 712, NOT_REGISTERED = 713, NOT_PERMITTED = 800, NOT_SUPPORTED = 801
};

#define PAGE 4096ull
#define GRANULARITY (64ull << 10)
#define REGIONS_MAX 65536
#define STREAMS_PER_CONTEXT_MAX 64
#define PITCH_MAX 0x7fffffffull

/* ---- process state ------------------------------------------------------------------------- */

struct context { int device; int retained; struct stream *null_stream; };

enum { PORTABLE = 1, DEVICEMAP = 2 };
enum region_kind { DEVICE_REGION, IMPORT_REGION, MAPPED_REGION, HOST_REGION };

struct region {
    enum region_kind kind;
    uint64_t base, size;
    char *alias;            /* where the double touches it */
    int fd;                 /* memfd; -1 for host memory */
    int device;
    unsigned flags;         /* registrations: see cuMemHostRegister */
    int opened;             /* imports: how often */
    uint64_t identity;      /* inode of the memfd */
    struct handle *handle;  /* mapped regions */
    atomic_int pending;     /* queued operations that touch it */
    int dead;
};

struct handle { int fd; uint64_t size; int device; int refs; uint64_t identity; int exportable; };
struct reservation { uint64_t base, size; };

enum op_kind { COPY, WRITE64, SET8, RECORD };

struct piece { char *dst, *src; uint64_t size; struct region *dst_region, *src_region; };

struct op {
    enum op_kind kind;
    struct op *next;
    struct piece *pieces;
    size_t count;
    int direction;          /* 0 to device, 1 to host, -1 neither */
    int64_t queued_ns;
    uint64_t bytes;
    int wrong;
    char *where;
    uint64_t value;
    struct region *region;
    struct event *event;
    void *owned;
};

struct stream {
    struct context *context;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t arrived, idle;
    struct op *head, *tail;
    int running, closing;
    unsigned seed;
    int lowest;
    int64_t free_ns;        /* by the clock, when what was queued has ended */
};

struct event { atomic_int pending; _Atomic int64_t reached_ns; };

static pthread_mutex_t state = PTHREAD_MUTEX_INITIALIZER;
static struct region *regions[REGIONS_MAX];
static int num_regions;
static struct reservation reservations[4096];
static int num_reservations;
static struct context contexts[DEVICES_MAX];
static int started_pid;
static struct control own_control;
static struct control *control = &own_control;
static struct process *ledger = &own_control.processes[0];
static __thread CUcontext current;
static __thread CUcontext stack[16];
static __thread int stack_depth;

static void attach_control(void) {
    own_control.num_devices = 1;
    own_control.driver_version = 12080;
    own_control.batch_descriptors_max = 51827;
    const char *path = getenv("KVLAKE_CUDA_DOUBLE");
    if (path) {
        int fd = open(path, O_RDWR | O_CLOEXEC);
        if (fd < 0) { fprintf(stderr, "double: %s: %s\n", path, strerror(errno)); abort(); }
        void *map = mmap(NULL, sizeof(struct control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        close(fd);
        if (map == MAP_FAILED || ((struct control *)map)->magic != MAGIC
            || ((struct control *)map)->size != sizeof(struct control)) {
            fprintf(stderr, "double: %s is no control page of %zu bytes\n", path, sizeof(struct control));
            abort();
        }
        control = map;
        for (int i = 0; i < PROCESSES_MAX; i++) {
            uint32_t nobody = 0;
            if (__atomic_compare_exchange_n(&control->processes[i].pid, &nobody, (uint32_t)getpid(), 0,
                                            __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
                ledger = &control->processes[i];
                break;
            }
        }
    }
}

static void violate(const char *what, uint64_t detail) {
    if (__atomic_fetch_add(&ledger->violations, 1, __ATOMIC_SEQ_CST) == 0)
        snprintf(ledger->first_violation, sizeof ledger->first_violation, "%s (%#llx)", what,
                 (unsigned long long)detail);
}

static void live(enum kind kind, int by) { __atomic_fetch_add(&ledger->live[kind], by, __ATOMIC_SEQ_CST); }
static void count(uint32_t *what) { __atomic_fetch_add(what, 1, __ATOMIC_SEQ_CST); }

static CUresult injected(const char *call) {
    for (int i = 0; i < FAULTS_MAX; i++) {
        struct fault *fault = &control->faults[i];
        if (!fault->times || strcmp(fault->call, call)) continue;
        if (fault->skip) { fault->skip--; continue; }
        fault->times--;
        count(&fault->hit);
        return (CUresult)fault->code;
    }
    return SUCCESS;
}

/* Every call begins with one of these. */
#define BEGIN(name) do { \
        if (started_pid != getpid()) return NOT_INITIALIZED; \
        CUresult bad_ = injected(name); if (bad_) return bad_; } while (0)
#define BEGIN_IN_CONTEXT(name) do { BEGIN(name); if (!current || !current->retained) return INVALID_CONTEXT; } while (0)

/* ---- regions --------------------------------------------------------------------------------- */

static struct region *find(uint64_t address) { /* with `state` held */
    for (int i = 0; i < num_regions; i++)
        if (address - regions[i]->base < regions[i]->size) return regions[i];
    return NULL;
}

static struct region *add_region(enum region_kind kind, uint64_t base, uint64_t size, char *alias, int fd) {
    struct region *region = calloc(1, sizeof *region);
    struct stat found;
    region->kind = kind; region->base = base; region->size = size; region->alias = alias; region->fd = fd;
    region->device = current ? current->device : 0;
    region->opened = 1;
    if (fd >= 0 && fstat(fd, &found) == 0) region->identity = found.st_ino;
    if (num_regions == REGIONS_MAX) abort();
    regions[num_regions++] = region;
    return region;
}

/* Wait for what is queued on it: a driver does, or would write to what is no longer there. */
static void settle(struct region *region, const char *call, int allowed) {
    if (atomic_load(&region->pending) && !allowed) violate(call, region->base);
    pthread_mutex_unlock(&state);
    while (atomic_load(&region->pending)) usleep(200);
    pthread_mutex_lock(&state);
}

static void remove_region(struct region *region) {
    for (int i = 0; i < num_regions; i++)
        if (regions[i] == region) { regions[i] = regions[--num_regions]; break; }
    if (region->kind != HOST_REGION) {
        munmap(region->alias, region->size);
        if (region->kind == MAPPED_REGION)
            mmap((void *)region->base, region->size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
        else
            munmap((void *)region->base, region->size);
        if (region->fd >= 0) close(region->fd);
    }
    free(region);
}

/* Map a memfd: without access at the address callers see, with access for us. */
static struct region *map_memory(enum region_kind kind, int fd, uint64_t size, uint64_t at) {
    char *alias = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (alias == MAP_FAILED) return NULL;
    void *wanted = at ? (void *)at : NULL;
    if (!at) { /* as the real one: allocations begin on a large boundary */
        char *room = mmap(NULL, size + (2 << 20), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (room == MAP_FAILED) { munmap(alias, size); return NULL; }
        wanted = (void *)(((uint64_t)room + (2 << 20) - 1) & ~((2ull << 20) - 1));
        munmap(room, size + (2 << 20));
    }
    void *seen = mmap(wanted, size, PROT_NONE, MAP_SHARED | MAP_FIXED, fd, 0);
    if (seen == MAP_FAILED) { munmap(alias, size); return NULL; }
    return add_region(kind, (uint64_t)seen, size, alias, fd);
}

/* ---- streams --------------------------------------------------------------------------------- */

static void touch(struct piece *piece) {
    if (piece->dst_region) atomic_fetch_add(&piece->dst_region->pending, 1);
    if (piece->src_region) atomic_fetch_add(&piece->src_region->pending, 1);
}

static void let_go(struct piece *piece) {
    if (piece->dst_region) atomic_fetch_sub(&piece->dst_region->pending, 1);
    if (piece->src_region) atomic_fetch_sub(&piece->src_region->pending, 1);
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

/* A copy begins when it was queued, or when the one before it ended. What this thread wakes too late
 * delays the event behind the copy, but not the copies behind it. */
static void take_time(struct stream *stream, struct op *op) {
    int64_t began = op->queued_ns > stream->free_ns ? op->queued_ns : stream->free_ns;
    int64_t lasts = (int64_t)(op->bytes * 1000 / control->clock_mb_per_s);
    stream->free_ns = began + lasts;
    struct timespec until = {stream->free_ns / 1000000000ll, stream->free_ns % 1000000000ll};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) == EINTR) {}
    __atomic_fetch_add(&ledger->busy_ns[op->direction], (uint64_t)lasts, __ATOMIC_SEQ_CST);
}

static void move_pieces(struct stream *stream, struct op *op) {
    for (size_t left = op->count; left; left--) { /* any order is legal: pick one */
        size_t pick = rand_r(&stream->seed) % left;
        struct piece piece = op->pieces[pick];
        op->pieces[pick] = op->pieces[left - 1];
        op->pieces[left - 1] = piece;
        uint64_t step = control->piece_bytes ? control->piece_bytes : piece.size;
        int backwards = rand_r(&stream->seed) & 1;
        uint64_t steps = (piece.size + step - 1) / step;
        for (uint64_t i = 0; i < steps; i++) {
            uint64_t at = (backwards ? steps - 1 - i : i) * step;
            uint64_t bytes = piece.size - at < step ? piece.size - at : step;
            memcpy(piece.dst + at, piece.src + at, bytes);
            if (control->piece_bytes && control->delay_us_max && !(rand_r(&stream->seed) & 7))
                usleep(rand_r(&stream->seed) % control->delay_us_max / 4);
        }
        if (op->wrong && left == 1) piece.dst[0] ^= 0x55;
    }
}

static void run_copy(struct stream *stream, struct op *op) {
    while (control->hold) usleep(200);
    if (control->clock_mb_per_s && op->direction >= 0) take_time(stream, op);
    else move_pieces(stream, op);
    for (size_t i = 0; i < op->count; i++) let_go(&op->pieces[i]);
    if (op->direction >= 0) {
        __atomic_fetch_add(&ledger->copied_bytes[op->direction], op->bytes, __ATOMIC_SEQ_CST);
        __atomic_fetch_sub(&ledger->inflight_bytes[op->direction], (int64_t)op->bytes, __ATOMIC_SEQ_CST);
    }
}

static void run_op(struct stream *stream, struct op *op) {
    if (control->delay_us_max) usleep(rand_r(&stream->seed) % control->delay_us_max);
    switch (op->kind) {
    case COPY: run_copy(stream, op); break;
    case WRITE64:
        while (control->hold == 2) usleep(200);
        __atomic_store_n((uint64_t *)op->where, op->value, __ATOMIC_SEQ_CST);
        atomic_fetch_sub(&op->region->pending, 1);
        break;
    case SET8:
        memset(op->where, (int)op->value, op->bytes);
        atomic_fetch_sub(&op->region->pending, 1);
        break;
    case RECORD:
        atomic_store(&op->event->reached_ns, now_ns());
        atomic_fetch_sub(&op->event->pending, 1);
        break;
    }
    free(op->pieces);
    free(op->owned);
    free(op);
}

static void *stream_main(void *argument) {
    struct stream *stream = argument;
    prctl(PR_SET_TIMERSLACK, 1000);
    pthread_mutex_lock(&stream->lock);
    for (;;) {
        while (!stream->head && !stream->closing) pthread_cond_wait(&stream->arrived, &stream->lock);
        if (!stream->head) break;
        struct op *op = stream->head;
        stream->head = op->next;
        if (!stream->head) stream->tail = NULL;
        stream->running = 1;
        pthread_mutex_unlock(&stream->lock);
        run_op(stream, op);
        pthread_mutex_lock(&stream->lock);
        stream->running = 0;
        if (!stream->head) pthread_cond_broadcast(&stream->idle);
    }
    pthread_mutex_unlock(&stream->lock);
    return NULL;
}

static struct stream *new_stream(struct context *context) {
    struct stream *stream = calloc(1, sizeof *stream);
    stream->context = context;
    stream->seed = control->seed * 2654435761u + (unsigned)getpid() + (unsigned)(uintptr_t)stream;
    pthread_mutex_init(&stream->lock, NULL);
    pthread_cond_init(&stream->arrived, NULL);
    pthread_cond_init(&stream->idle, NULL);
    pthread_create(&stream->thread, NULL, stream_main, stream);
    return stream;
}

static struct stream *stream_of(CUstream stream) { /* the NULL stream is one like any other here */
    if (stream && stream != (CUstream)1 && stream != (CUstream)2) return stream;
    pthread_mutex_lock(&state);
    if (!current->null_stream) current->null_stream = new_stream(current);
    struct stream *found = current->null_stream;
    pthread_mutex_unlock(&state);
    return found;
}

static void enqueue(struct stream *stream, struct op op) {
    struct op *queued = malloc(sizeof *queued);
    *queued = op;
    queued->queued_ns = now_ns();
    queued->next = NULL;
    pthread_mutex_lock(&stream->lock);
    if (stream->tail) stream->tail->next = queued; else stream->head = queued;
    stream->tail = queued;
    pthread_cond_signal(&stream->arrived);
    pthread_mutex_unlock(&stream->lock);
}

static void drain(struct stream *stream) {
    pthread_mutex_lock(&stream->lock);
    while (stream->head || stream->running) pthread_cond_wait(&stream->idle, &stream->lock);
    pthread_mutex_unlock(&stream->lock);
}

/* ---- copies ---------------------------------------------------------------------------------- */

/* Where a range is; false where it leaves its allocation or straddles two registrations. */
static int resolve(uint64_t address, uint64_t size, char **where, struct region **region) {
    struct region *found = find(address);
    *region = found;
    if (!found) {
        struct region *last = find(address + size - 1);
        *where = (char *)address;
        if (last) { violate("a copy begins outside the region that it ends in", address); return 0; }
        return 1; /* pageable host memory */
    }
    *where = found->alias + (address - found->base);
    if (address - found->base + size > found->size) {
        violate("a copy leaves its allocation or straddles two registrations", address);
        return 0;
    }
    if (found->kind == HOST_REGION && found->device != current->device && !(found->flags & PORTABLE)) {
        violate("host memory that another device registered is not PORTABLE", address);
        return 0;
    }
    return 1;
}

static int is_device(struct region *region) { return region && region->kind != HOST_REGION; }

static CUresult queue_copy(CUstream stream, const CUdeviceptr *dsts, const CUdeviceptr *srcs,
                           const size_t *sizes, size_t num, size_t *failed, int wrong) {
    struct op op = {.kind = COPY, .count = num, .direction = -1};
    op.pieces = calloc(num, sizeof *op.pieces);
    int pageable = 0, wait = 0;
    pthread_mutex_lock(&state);
    for (size_t i = 0; i < num; i++) {
        struct piece *piece = &op.pieces[i];
        piece->size = sizes[i];
        op.bytes += sizes[i];
        if (!sizes[i] || !resolve(dsts[i], sizes[i], &piece->dst, &piece->dst_region)
            || !resolve(srcs[i], sizes[i], &piece->src, &piece->src_region)
            || (is_device(piece->dst_region) && piece->dst_region->device != current->device)
            || (is_device(piece->src_region) && piece->src_region->device != current->device)) {
            pthread_mutex_unlock(&state);
            free(op.pieces);
            if (failed) *failed = i;
            return INVALID_VALUE;
        }
        pageable |= !piece->dst_region || !piece->src_region;
        wait |= !piece->dst_region;
    }
    for (size_t i = 0; i < num; i++) touch(&op.pieces[i]);
    if (is_device(op.pieces[0].dst_region) && !is_device(op.pieces[0].src_region)) op.direction = 0;
    if (is_device(op.pieces[0].src_region) && !is_device(op.pieces[0].dst_region)) op.direction = 1;
    pthread_mutex_unlock(&state);
    if (pageable) {
        count(&ledger->pageable_copies);
        if (!op.pieces[0].src_region) { /* staged in the call, as the driver does */
            op.owned = malloc(sizes[0]);
            memcpy(op.owned, op.pieces[0].src, sizes[0]);
            op.pieces[0].src = op.owned;
        }
    }
    if (op.direction >= 0) {
        int64_t now = __atomic_add_fetch(&ledger->inflight_bytes[op.direction], (int64_t)op.bytes, __ATOMIC_SEQ_CST);
        if (now > ledger->inflight_bytes_max[op.direction]) ledger->inflight_bytes_max[op.direction] = now;
    }
    op.wrong = wrong;
    struct stream *queue = stream_of(stream);
    enqueue(queue, op);
    if (wait) drain(queue);
    return SUCCESS;
}

CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t size, CUstream stream) {
    BEGIN_IN_CONTEXT("cuMemcpyAsync");
    count(&ledger->plain_copies);
    return queue_copy(stream, &dst, &src, &size, 1, NULL, 0);
}
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr dst, const void *src, size_t size, CUstream stream) {
    return cuMemcpyAsync(dst, (CUdeviceptr)src, size, stream);
}
CUresult cuMemcpyDtoHAsync_v2(void *dst, CUdeviceptr src, size_t size, CUstream stream) {
    return cuMemcpyAsync((CUdeviceptr)dst, src, size, stream);
}

struct plane_side { size_t x, y; unsigned type; void *host; CUdeviceptr device; void *array; size_t pitch; };
struct plane { struct plane_side src, dst; size_t width, height; };

/* Where a plane begins; false where it is not what kvlake may ask for, or leaves its memory. */
static int resolve_side(const struct plane_side *side, const struct plane *plane, CUdeviceptr *base) {
    char *where;
    struct region *region;
    if (side->x || side->y || side->array || side->pitch < plane->width || side->pitch > PITCH_MAX) return 0;
    if (side->type != 1 && side->type != 2) return 0;
    *base = side->type == 1 ? (CUdeviceptr)side->host : side->device;
    /* As a whole: its rows may not lie in two registrations. */
    return resolve(*base, side->pitch * (plane->height - 1) + plane->width, &where, &region)
        && is_device(region) == (side->type == 2);
}
CUresult cuMemcpy2DAsync_v2(const struct plane *plane, CUstream stream) {
    BEGIN_IN_CONTEXT("cuMemcpy2DAsync");
    CUdeviceptr dst, src;
    if (!plane->width || !plane->height) return INVALID_VALUE;
    pthread_mutex_lock(&state);
    int right = resolve_side(&plane->dst, plane, &dst) && resolve_side(&plane->src, plane, &src);
    pthread_mutex_unlock(&state);
    if (!right) return INVALID_VALUE;
    count(&ledger->plane_copies);
    size_t num = plane->height;
    CUdeviceptr *sides = malloc(2 * num * sizeof *sides);
    size_t *sizes = malloc(num * sizeof *sizes);
    for (size_t i = 0; i < num; i++) {
        sides[i] = dst + i * plane->dst.pitch;
        sides[num + i] = src + i * plane->src.pitch;
        sizes[i] = plane->width;
    }
    CUresult answer = queue_copy(stream, sides, sides + num, sizes, num, NULL, (int)control->break_planes);
    free(sides);
    free(sizes);
    return answer;
}

struct location { int type, id; };
struct attributes { int order; struct location src, dst; unsigned flags; };

static CUresult batch(const CUdeviceptr *dsts, const CUdeviceptr *srcs, const size_t *sizes, size_t num,
                      const struct attributes *attributes, const size_t *firsts, size_t num_attributes,
                      size_t *failed, CUstream stream) {
    BEGIN_IN_CONTEXT("cuMemcpyBatchAsync");
    if (failed) *failed = (size_t)-1;
    if (!stream || stream == (CUstream)1 || stream == (CUstream)2) {
        violate("cuMemcpyBatchAsync on the NULL stream", 0);
        return INVALID_VALUE;
    }
    if (!num || !dsts || !srcs || !sizes) return INVALID_VALUE;
    if (num > control->batch_descriptors_max) { violate("too many descriptors in one batch", num); return INVALID_VALUE; }
    if (!attributes || !firsts || !num_attributes || num_attributes > num || firsts[0]) return INVALID_VALUE;
    for (size_t i = 0; i < num_attributes; i++) {
        if (attributes[i].order < 1 || attributes[i].order > 3 || attributes[i].flags > 1) return INVALID_VALUE;
        if (i && firsts[i] <= firsts[i - 1]) return INVALID_VALUE;
    }
    count(&ledger->batches);
    __atomic_fetch_add(&ledger->descriptors, num, __ATOMIC_SEQ_CST);
    if (num > ledger->descriptors_max) ledger->descriptors_max = (uint32_t)num;
    return queue_copy(stream, dsts, srcs, sizes, num, failed, num > 1 && control->break_batches);
}
CUresult cuMemcpyBatchAsync(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t num,
                            struct attributes *attributes, size_t *firsts, size_t num_attributes,
                            size_t *failed, CUstream stream) {
    return batch(dsts, srcs, sizes, num, attributes, firsts, num_attributes, failed, stream);
}
CUresult cuMemcpyBatchAsync_v2(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t num,
                               struct attributes *attributes, size_t *firsts, size_t num_attributes,
                               CUstream stream) {
    return batch(dsts, srcs, sizes, num, attributes, firsts, num_attributes, NULL, stream);
}

static CUresult queue_word(enum op_kind kind, CUstream stream, CUdeviceptr at, uint64_t value, size_t size) {
    struct op op = {.kind = kind, .value = value, .bytes = size, .direction = -1};
    pthread_mutex_lock(&state);
    int there = resolve(at, size, &op.where, &op.region) && op.region;
    if (there) atomic_fetch_add(&op.region->pending, 1);
    pthread_mutex_unlock(&state);
    if (!there) return INVALID_VALUE;
    enqueue(stream_of(stream), op);
    return SUCCESS;
}
CUresult cuMemsetD8Async(CUdeviceptr at, unsigned char value, size_t size, CUstream stream) {
    BEGIN_IN_CONTEXT("cuMemsetD8Async");
    return queue_word(SET8, stream, at, value, size);
}
CUresult cuStreamWriteValue64_v2(CUstream stream, CUdeviceptr at, uint64_t value, unsigned flags) {
    BEGIN_IN_CONTEXT("cuStreamWriteValue64");
    if (flags > 1 || at % 8) return INVALID_VALUE;
    if (control->no_stream_writes) return NOT_SUPPORTED;
    count(&ledger->stream_writes);
    return queue_word(WRITE64, stream, at, value, 8);
}

/* ---- life ------------------------------------------------------------------------------------ */

CUresult cuInit(unsigned flags) {
    if (flags) return INVALID_VALUE;
    pthread_mutex_lock(&state);
    if (!started_pid) { attach_control(); started_pid = getpid(); }
    pthread_mutex_unlock(&state);
    BEGIN("cuInit");
    return control->num_devices ? SUCCESS : 100;
}
CUresult cuDriverGetVersion(int *version) { *version = control->magic ? (int)control->driver_version : 12080; return SUCCESS; }
CUresult cuDeviceGetCount(int *num) { BEGIN("cuDeviceGetCount"); *num = (int)control->num_devices; return SUCCESS; }
static int is_one(CUdevice device) { return device >= 0 && device < (int)control->num_devices; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    BEGIN("cuDeviceGet");
    if (!is_one(ordinal)) return INVALID_DEVICE;
    *device = ordinal;
    return SUCCESS;
}
/* Ordinals differ between processes, as CUDA_VISIBLE_DEVICES makes them; identities do not. */
static int identity_of(CUdevice device) {
    const char *shift = getenv("KVLAKE_CUDA_DOUBLE_FIRST");
    return (device + (shift ? atoi(shift) : 0)) % (int)control->num_devices;
}
CUresult cuDeviceGetUuid_v2(unsigned char uuid[16], CUdevice device) {
    BEGIN("cuDeviceGetUuid");
    if (!is_one(device)) return INVALID_DEVICE;
    memset(uuid, 0xd0, 16);
    uuid[15] = (unsigned char)identity_of(device);
    return SUCCESS;
}
CUresult cuDeviceGetName(char *name, int size, CUdevice device) {
    BEGIN("cuDeviceGetName");
    if (!is_one(device)) return INVALID_DEVICE;
    const char *given = control->device_names[identity_of(device)];
    snprintf(name, (size_t)size, "%s", given[0] ? given : "Double of a GPU");
    return SUCCESS;
}
CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) { BEGIN("cuDeviceTotalMem"); *bytes = 1ull << 30; return SUCCESS; }
CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
    BEGIN("cuDeviceGetAttribute");
    if (!is_one(device)) return INVALID_DEVICE;
    switch (attribute) {
    case 11: *value = (int)PITCH_MAX; break;              /* MAX_PITCH */
    case 93: *value = !control->no_stream_writes; break;  /* CAN_USE_64_BIT_STREAM_MEM_OPS_V1 */
    case 122: *value = !control->no_stream_writes; break; /* CAN_USE_64_BIT_STREAM_MEM_OPS */
    case 102: case 103: *value = 1; break;                /* VMM, POSIX descriptors as handles */
    case 134: *value = 0; break;                          /* HOST_NUMA_ID */
    default: *value = 1;
    }
    return SUCCESS;
}
CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) {
    BEGIN("cuDeviceCanAccessPeer");
    *can = is_one(device) && is_one(peer) && device != peer;
    return SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    BEGIN("cuDevicePrimaryCtxRetain");
    if (!is_one(device)) return INVALID_DEVICE;
    contexts[device].device = identity_of(device);
    if (!contexts[device].retained++) live(CONTEXT, 1);
    *context = &contexts[device];
    return SUCCESS;
}
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    BEGIN("cuDevicePrimaryCtxRelease");
    if (!is_one(device) || !contexts[device].retained) return INVALID_CONTEXT;
    if (!--contexts[device].retained) live(CONTEXT, -1);
    return SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext context) { BEGIN("cuCtxSetCurrent"); current = context; return SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *context) { BEGIN("cuCtxGetCurrent"); *context = current; return SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) {
    BEGIN_IN_CONTEXT("cuCtxGetDevice");
    *device = (CUdevice)(current - contexts);
    return SUCCESS;
}
CUresult cuCtxPushCurrent_v2(CUcontext context) {
    BEGIN("cuCtxPushCurrent");
    if (!context || stack_depth == 16) return INVALID_CONTEXT;
    stack[stack_depth++] = current;
    current = context;
    return SUCCESS;
}
CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    BEGIN("cuCtxPopCurrent");
    if (!stack_depth) return INVALID_CONTEXT;
    if (context) *context = current;
    current = stack[--stack_depth];
    return SUCCESS;
}
CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    BEGIN_IN_CONTEXT("cuCtxGetStreamPriorityRange");
    *least = 0; *greatest = -5;
    return SUCCESS;
}
CUresult cuCtxSynchronize(void) {
    BEGIN_IN_CONTEXT("cuCtxSynchronize");
    count(&ledger->waits);
    if (current->null_stream) drain(current->null_stream);
    return SUCCESS;
}

CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority) {
    BEGIN_IN_CONTEXT("cuStreamCreate");
    if (flags > 1) return INVALID_VALUE;
    *stream = new_stream(current);
    (*stream)->lowest = priority >= 0;
    if (priority >= 0) __atomic_fetch_add(&ledger->priority_lowest_streams, 1, __ATOMIC_SEQ_CST);
    live(STREAM, 1);
    return SUCCESS;
}
CUresult cuStreamCreate(CUstream *stream, unsigned flags) { return cuStreamCreateWithPriority(stream, flags, -1); }
CUresult cuStreamDestroy_v2(CUstream stream) {
    BEGIN("cuStreamDestroy");
    if (!stream) return INVALID_HANDLE;
    pthread_mutex_lock(&stream->lock);
    stream->closing = 1;
    pthread_cond_broadcast(&stream->arrived);
    pthread_mutex_unlock(&stream->lock);
    pthread_join(stream->thread, NULL);
    if (stream->lowest) __atomic_fetch_sub(&ledger->priority_lowest_streams, 1, __ATOMIC_SEQ_CST);
    free(stream);
    live(STREAM, -1);
    return SUCCESS;
}
CUresult cuStreamSynchronize(CUstream stream) {
    BEGIN_IN_CONTEXT("cuStreamSynchronize");
    count(&ledger->waits);
    drain(stream_of(stream));
    return SUCCESS;
}
CUresult cuEventCreate(CUevent *event, unsigned flags) {
    BEGIN_IN_CONTEXT("cuEventCreate");
    *event = calloc(1, sizeof **event);
    live(EVENT, 1);
    return SUCCESS;
}
CUresult cuEventRecord(CUevent event, CUstream stream) {
    BEGIN_IN_CONTEXT("cuEventRecord");
    if (!event) return INVALID_HANDLE;
    atomic_fetch_add(&event->pending, 1);
    enqueue(stream_of(stream), (struct op){.kind = RECORD, .event = event, .direction = -1});
    return SUCCESS;
}
CUresult cuEventQuery(CUevent event) {
    BEGIN("cuEventQuery");
    if (!event) return INVALID_HANDLE;
    return atomic_load(&event->pending) ? NOT_READY : SUCCESS;
}
CUresult cuEventElapsedTime(float *milliseconds, CUevent begun, CUevent ended) {
    BEGIN("cuEventElapsedTime");
    if (!begun || !ended) return INVALID_HANDLE;
    if (atomic_load(&begun->pending) || atomic_load(&ended->pending)) return NOT_READY;
    *milliseconds = (float)(atomic_load(&ended->reached_ns) - atomic_load(&begun->reached_ns)) / 1e6f;
    return SUCCESS;
}
CUresult cuEventElapsedTime_v2(float *milliseconds, CUevent begun, CUevent ended) {
    return cuEventElapsedTime(milliseconds, begun, ended);
}
CUresult cuEventSynchronize(CUevent event) {
    BEGIN("cuEventSynchronize");
    count(&ledger->waits);
    while (atomic_load(&event->pending)) usleep(200);
    return SUCCESS;
}
CUresult cuEventDestroy_v2(CUevent event) {
    BEGIN("cuEventDestroy");
    if (!event) return INVALID_HANDLE;
    if (atomic_load(&event->pending)) violate("an event was destroyed before it was reached", 0);
    else free(event);
    live(EVENT, -1);
    return SUCCESS;
}

/* ---- memory ---------------------------------------------------------------------------------- */

static int new_memfd(uint64_t size) {
    int fd = memfd_create("kvlake-double-device", MFD_CLOEXEC);
    if (fd >= 0 && ftruncate(fd, (off_t)size)) { close(fd); return -1; }
    return fd;
}
static uint64_t pages(uint64_t size) { return (size + PAGE - 1) & ~(PAGE - 1); }

CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t size) {
    BEGIN_IN_CONTEXT("cuMemAlloc");
    if (!size) return INVALID_VALUE;
    int fd = new_memfd(pages(size));
    if (fd < 0) return OUT_OF_MEMORY;
    pthread_mutex_lock(&state);
    struct region *region = map_memory(DEVICE_REGION, fd, pages(size), 0);
    pthread_mutex_unlock(&state);
    if (!region) { close(fd); return OUT_OF_MEMORY; }
    *address = region->base;
    live(ALLOCATION, 1);
    return SUCCESS;
}
CUresult cuMemFree_v2(CUdeviceptr address) {
    BEGIN_IN_CONTEXT("cuMemFree");
    pthread_mutex_lock(&state);
    struct region *region = find(address);
    int right = region && region->kind == DEVICE_REGION && region->base == address;
    if (right) {
        settle(region, "cuMemFree", 1); /* the real one waits for the device */
        remove_region(region);
        live(ALLOCATION, -1);
    }
    pthread_mutex_unlock(&state);
    return right ? SUCCESS : INVALID_VALUE;
}
/* What is left: of all devices together, and by what processes hold, so that a killed one's is back
 * when the kernel has taken it. */
CUresult cuMemGetInfo_v2(size_t *available, size_t *total) {
    BEGIN_IN_CONTEXT("cuMemGetInfo");
    static ino_t seen[4096];
    size_t num_seen = 0, used = 0;
    pthread_mutex_lock(&state);
    for (int i = 0; i < PROCESSES_MAX && control->processes[i].pid; i++) {
        char path[320], target[128];
        snprintf(path, sizeof path, "/proc/%u/fd", control->processes[i].pid);
        DIR *folder = opendir(path);
        if (!folder) continue;
        for (struct dirent *entry; (entry = readdir(folder));) {
            struct stat found;
            snprintf(path, sizeof path, "/proc/%u/fd/%s", control->processes[i].pid, entry->d_name);
            ssize_t length = readlink(path, target, sizeof target - 1);
            if (length <= 0) continue;
            target[length] = 0;
            if (!strstr(target, "kvlake-double-device") || stat(path, &found)) continue;
            size_t at = 0;
            while (at < num_seen && seen[at] != found.st_ino) at++;
            if (at < num_seen || num_seen == sizeof seen / sizeof *seen) continue;
            seen[num_seen++] = found.st_ino;
            used += (size_t)found.st_size;
        }
        closedir(folder);
    }
    pthread_mutex_unlock(&state);
    *total = 1ull << 30;
    *available = used < *total ? *total - used : 0;
    return SUCCESS;
}
CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr address) {
    BEGIN_IN_CONTEXT("cuMemGetAddressRange");
    pthread_mutex_lock(&state);
    struct region *region = find(address);
    int there = is_device(region);
    if (there) {
        if (base) *base = region->base;
        if (size) *size = region->size;
    }
    pthread_mutex_unlock(&state);
    return there ? SUCCESS : NOT_FOUND;
}
CUresult cuPointerGetAttribute(void *value, int attribute, CUdeviceptr address) {
    BEGIN("cuPointerGetAttribute");
    pthread_mutex_lock(&state);
    struct region *region = find(address);
    CUresult answer = SUCCESS;
    if (!region) answer = INVALID_VALUE;
    else if (attribute == 2) *(unsigned *)value = region->kind == HOST_REGION ? 1 : 2; /* MEMORY_TYPE */
    else if (attribute == 9) *(int *)value = region->device;                           /* DEVICE_ORDINAL */
    else if (attribute == 13) *(unsigned char *)value = region->kind == DEVICE_REGION; /* LEGACY_CUDA_IPC */
    else answer = INVALID_VALUE;
    pthread_mutex_unlock(&state);
    return answer;
}

/* An IPC handle: who made it, and which of its descriptors it is. */
struct ipc_handle { uint32_t magic, pid; int32_t fd, device; uint64_t size, identity; char pad[32]; };

CUresult cuIpcGetMemHandle(struct ipc_handle *handle, CUdeviceptr address) {
    BEGIN_IN_CONTEXT("cuIpcGetMemHandle");
    pthread_mutex_lock(&state);
    struct region *region = find(address);
    CUresult answer = !region ? INVALID_VALUE : region->kind == DEVICE_REGION ? SUCCESS : INVALID_VALUE;
    if (answer == SUCCESS)
        *handle = (struct ipc_handle){.magic = MAGIC, .pid = (uint32_t)getpid(), .fd = region->fd,
                                      .device = region->device, .size = region->size, .identity = region->identity};
    pthread_mutex_unlock(&state);
    return answer;
}
CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, struct ipc_handle handle, unsigned flags) {
    BEGIN_IN_CONTEXT("cuIpcOpenMemHandle");
    if (flags != 1 || handle.magic != MAGIC) return INVALID_VALUE;
    if (handle.pid == (uint32_t)getpid()) return INVALID_CONTEXT;
    if (handle.device != current->device) return INVALID_DEVICE;
    pthread_mutex_lock(&state);
    for (int i = 0; i < num_regions; i++)
        if (regions[i]->kind == IMPORT_REGION && regions[i]->identity == handle.identity
            && regions[i]->device == current->device) {
            regions[i]->opened++;
            *address = regions[i]->base;
            pthread_mutex_unlock(&state);
            live(IMPORT, 1);
            return SUCCESS;
        }
    char path[64];
    snprintf(path, sizeof path, "/proc/%u/fd/%d", handle.pid, handle.fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    struct stat found;
    struct region *region = NULL;
    if (fd >= 0 && fstat(fd, &found) == 0 && found.st_ino == handle.identity)
        region = map_memory(IMPORT_REGION, fd, handle.size, 0);
    if (!region && fd >= 0) close(fd);
    if (region) *address = region->base;
    pthread_mutex_unlock(&state);
    if (!region) return INVALID_HANDLE;
    live(IMPORT, 1);
    return SUCCESS;
}
CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
    BEGIN_IN_CONTEXT("cuIpcCloseMemHandle");
    pthread_mutex_lock(&state);
    struct region *region = find(address);
    int right = region && region->kind == IMPORT_REGION && region->base == address;
    if (right && !--region->opened) {
        settle(region, "an import was closed while copies that touch it were queued", 0);
        remove_region(region);
    }
    pthread_mutex_unlock(&state);
    if (!right) return INVALID_VALUE;
    live(IMPORT, -1);
    return SUCCESS;
}

/* ---- VMM ------------------------------------------------------------------------------------- */

struct allocation_prop { int type, handle_types; struct location location; void *metadata; unsigned char rest[8]; };
struct access { struct location location; int flags; };

CUresult cuMemGetAllocationGranularity(size_t *bytes, const struct allocation_prop *prop, int option) {
    BEGIN("cuMemGetAllocationGranularity");
    *bytes = GRANULARITY;
    return SUCCESS;
}
CUresult cuMemCreate(struct handle **handle, size_t size, const struct allocation_prop *prop, unsigned long long flags) {
    BEGIN("cuMemCreate");
    if (!size || size % GRANULARITY || flags || prop->type != 1 || prop->location.type != 1) return INVALID_VALUE;
    if (!is_one(prop->location.id)) return INVALID_DEVICE;
    int fd = new_memfd(size);
    if (fd < 0) return OUT_OF_MEMORY;
    struct stat found;
    fstat(fd, &found);
    *handle = calloc(1, sizeof **handle);
    **handle = (struct handle){.fd = fd, .size = size, .device = identity_of(prop->location.id), .refs = 1,
                               .identity = found.st_ino, .exportable = prop->handle_types & 1};
    live(HANDLE, 1);
    return SUCCESS;
}
static void drop_handle(struct handle *handle) {
    if (--handle->refs) return;
    close(handle->fd);
    free(handle);
}
CUresult cuMemRelease(struct handle *handle) {
    BEGIN("cuMemRelease");
    if (!handle) return INVALID_VALUE;
    pthread_mutex_lock(&state);
    drop_handle(handle);
    pthread_mutex_unlock(&state);
    live(HANDLE, -1);
    return SUCCESS;
}
CUresult cuMemRetainAllocationHandle(struct handle **handle, void *address) {
    BEGIN("cuMemRetainAllocationHandle");
    pthread_mutex_lock(&state);
    struct region *region = find((uint64_t)address);
    int right = region && region->kind == MAPPED_REGION;
    if (right) { *handle = region->handle; (*handle)->refs++; live(HANDLE, 1); }
    pthread_mutex_unlock(&state);
    return right ? SUCCESS : INVALID_VALUE;
}
CUresult cuMemExportToShareableHandle(void *shareable, struct handle *handle, int type, unsigned long long flags) {
    BEGIN("cuMemExportToShareableHandle");
    if (type != 1 || flags || !handle || !handle->exportable) return INVALID_VALUE;
    int fd = fcntl(handle->fd, F_DUPFD_CLOEXEC, 3);
    if (fd < 0) return OUT_OF_MEMORY;
    *(int *)shareable = fd;
    return SUCCESS;
}
CUresult cuMemImportFromShareableHandle(struct handle **handle, void *shareable, int type) {
    BEGIN("cuMemImportFromShareableHandle");
    struct stat found;
    char path[64], target[128];
    int given = (int)(intptr_t)shareable;
    snprintf(path, sizeof path, "/proc/self/fd/%d", given);
    ssize_t length = readlink(path, target, sizeof target - 1);
    if (type != 1 || length <= 0) return INVALID_VALUE;
    target[length] = 0;
    if (!strstr(target, "kvlake-double-device") || fstat(given, &found)) return INVALID_VALUE;
    int fd = fcntl(given, F_DUPFD_CLOEXEC, 3);
    if (fd < 0) return OUT_OF_MEMORY;
    *handle = calloc(1, sizeof **handle);
    **handle = (struct handle){.fd = fd, .size = (uint64_t)found.st_size, .device = -1, .refs = 1,
                               .identity = found.st_ino};
    live(HANDLE, 1);
    return SUCCESS;
}
CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr at, unsigned long long flags) {
    BEGIN("cuMemAddressReserve");
    if (!size || size % GRANULARITY || flags) return INVALID_VALUE;
    char *room = mmap(NULL, size + (2 << 20), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (room == MAP_FAILED) return OUT_OF_MEMORY;
    uint64_t base = ((uint64_t)room + (2 << 20) - 1) & ~((2ull << 20) - 1);
    pthread_mutex_lock(&state);
    reservations[num_reservations++] = (struct reservation){base, size};
    pthread_mutex_unlock(&state);
    *address = base;
    live(RESERVATION, 1);
    return SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
    BEGIN("cuMemAddressFree");
    pthread_mutex_lock(&state);
    int right = 0;
    for (int i = 0; i < num_reservations; i++)
        if (reservations[i].base == address && reservations[i].size == size) {
            for (int j = 0; j < num_regions; j++)
                if (regions[j]->base - address < size) violate("an address range was freed with memory mapped in it", address);
            reservations[i] = reservations[--num_reservations];
            right = 1;
            break;
        }
    pthread_mutex_unlock(&state);
    if (!right) return INVALID_VALUE;
    live(RESERVATION, -1);
    return SUCCESS;
}
CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, struct handle *handle, unsigned long long flags) {
    BEGIN("cuMemMap");
    if (!handle || offset || flags || !size || size % GRANULARITY || size > handle->size) return INVALID_VALUE;
    pthread_mutex_lock(&state);
    int reserved = 0;
    for (int i = 0; i < num_reservations; i++)
        reserved |= address >= reservations[i].base && address + size <= reservations[i].base + reservations[i].size;
    int fd = reserved && !find(address) ? fcntl(handle->fd, F_DUPFD_CLOEXEC, 3) : -1;
    struct region *region = fd < 0 ? NULL : map_memory(MAPPED_REGION, fd, size, address);
    if (region) {
        region->handle = handle;
        region->device = -1; /* nobody's until cuMemSetAccess */
        handle->refs++;
    }
    pthread_mutex_unlock(&state);
    if (!region) return INVALID_VALUE;
    live(MAPPING, 1);
    return SUCCESS;
}
CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const struct access *access, size_t num) {
    BEGIN("cuMemSetAccess");
    if (num != 1 || access->location.type != 1 || access->flags != 3 || !is_one(access->location.id)) return INVALID_VALUE;
    pthread_mutex_lock(&state);
    int found = 0;
    for (int i = 0; i < num_regions; i++)
        if (regions[i]->kind == MAPPED_REGION && regions[i]->base - address < size) {
            regions[i]->device = identity_of(access->location.id);
            found = 1;
        }
    pthread_mutex_unlock(&state);
    return found ? SUCCESS : INVALID_VALUE;
}
CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
    BEGIN("cuMemUnmap");
    pthread_mutex_lock(&state);
    struct region *region = find(address);
    int right = region && region->kind == MAPPED_REGION && region->base == address && region->size == size;
    if (right) {
        settle(region, "memory was unmapped while copies that touch it were queued", 0);
        drop_handle(region->handle);
        remove_region(region);
        live(MAPPING, -1);
    }
    pthread_mutex_unlock(&state);
    return right ? SUCCESS : INVALID_VALUE;
}

/* ---- host memory ----------------------------------------------------------------------------- */

CUresult cuMemHostRegister_v2(void *address, size_t size, unsigned flags) {
    BEGIN_IN_CONTEXT("cuMemHostRegister");
    uint64_t base = (uint64_t)address;
    if (!size || flags & ~15u || base % PAGE || size % PAGE) return INVALID_VALUE;
    pthread_mutex_lock(&state);
    for (int i = 0; i < num_regions; i++)
        if (regions[i]->kind == HOST_REGION && (regions[i]->base - base < size || base - regions[i]->base < regions[i]->size)) {
            pthread_mutex_unlock(&state);
            return ALREADY_REGISTERED;
        }
    add_region(HOST_REGION, base, size, address, -1)->flags = flags;
    pthread_mutex_unlock(&state);
    live(REGISTRATION, 1);
    return SUCCESS;
}
CUresult cuMemHostUnregister(void *address) {
    BEGIN_IN_CONTEXT("cuMemHostUnregister");
    pthread_mutex_lock(&state);
    struct region *region = find((uint64_t)address);
    int right = region && region->kind == HOST_REGION && region->base == (uint64_t)address;
    if (right) {
        settle(region, "host memory was unregistered while work that touches it was queued", 0);
        remove_region(region);
    }
    pthread_mutex_unlock(&state);
    if (!right) return NOT_REGISTERED;
    live(REGISTRATION, -1);
    return SUCCESS;
}
CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *device, void *address, unsigned flags) {
    BEGIN_IN_CONTEXT("cuMemHostGetDevicePointer");
    pthread_mutex_lock(&state);
    struct region *region = find((uint64_t)address);
    int there = region && region->kind == HOST_REGION;
    int mapped = there && region->flags & DEVICEMAP;
    if (there && !mapped) violate("host memory with a device pointer is not DEVICEMAP", region->base);
    pthread_mutex_unlock(&state);
    if (flags || !mapped) return INVALID_VALUE;
    *device = (CUdeviceptr)address;
    return SUCCESS;
}

/* ---- names ----------------------------------------------------------------------------------- */

CUresult cuGetErrorName(CUresult code, const char **name) {
    static __thread char text[32];
    snprintf(text, sizeof text, "CUDA_ERROR_%d", code);
    *name = text;
    return SUCCESS;
}
CUresult cuGetErrorString(CUresult code, const char **text) { return cuGetErrorName(code, text); }

/* An entry point by name, and by the version of the API that the caller was written for. */
CUresult cuGetProcAddress_v2(const char *symbol, void **entry, int version, uint64_t flags, int *status) {
    const char *name = symbol;
    char versioned[128];
    int have = started_pid ? (int)control->driver_version : 99000;
    *entry = NULL;
    if (version > have) return INVALID_VALUE;
    if (!strcmp(symbol, "cuMemcpyBatchAsync")) {
        if (version < 12080) {
            if (status) *status = 2;
            return SUCCESS;
        }
        name = version >= 13000 ? "cuMemcpyBatchAsync_v2" : symbol;
    }
    static void *self;
    if (!self) {
        Dl_info info;
        dladdr((void *)cuInit, &info);
        self = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    }
    if (strstr(name, "cuMemcpyBatch") == NULL) {
        snprintf(versioned, sizeof versioned, "%s_v2", symbol);
        *entry = dlsym(self, versioned);
    }
    if (!*entry) *entry = dlsym(self, name);
    if (status) *status = *entry ? 0 : 1;
    return SUCCESS;
}
CUresult cuGetProcAddress(const char *symbol, void **entry, int version, uint64_t flags) {
    return cuGetProcAddress_v2(symbol, entry, version, flags, NULL);
}
