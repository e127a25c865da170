/* What a process of the double and the tests share: one page file, mapped by all of them.
 *
 * The tests make it, say in it how the devices behave, and read from it what was called and what
 * is left. `double.py` describes the same bytes; `double_check` in it fails if they drift apart. */
#ifndef KVLAKE_DOUBLE_H
#define KVLAKE_DOUBLE_H

#include <stdint.h>

#define MAGIC 0x6b766c32u
#define DEVICES_MAX 8
#define FAULTS_MAX 8
#define PROCESSES_MAX 64
#define NAME_BYTES 64

/* What is counted while it lives. */
enum kind { CONTEXT, STREAM, EVENT, ALLOCATION, IMPORT, HANDLE, RESERVATION, MAPPING, REGISTRATION, KINDS };

struct fault {
    char call[NAME_BYTES];
    uint32_t code;      /* what the call returns */
    uint32_t skip;      /* after so many calls that go well */
    uint32_t times;     /* for so many calls; 0: this fault is not set */
    uint32_t hit;       /* how often it was returned */
};

struct process {
    uint32_t pid;
    uint32_t violations;        /* rules of the driver that were broken */
    char first_violation[192];
    int32_t live[KINDS];
    uint32_t waits;             /* calls that block on the device: synchronize of any sort */
    uint32_t batches;
    uint32_t descriptors_max;   /* of one batch */
    uint64_t descriptors;
    uint32_t plain_copies;
    uint32_t pageable_copies;   /* asynchronous copies with host memory that is not registered */
    uint64_t copied_bytes[2];   /* to device, to host */
    int64_t inflight_bytes[2];
    int64_t inflight_bytes_max[2];
    uint64_t busy_ns[2];        /* what copies took by `clock_mb_per_s` */
    uint32_t stream_writes;
    uint32_t plane_copies;      /* 2D */
    int32_t priority_lowest_streams;
};

struct control {
    uint32_t magic;
    uint32_t size;
    uint32_t num_devices;
    uint32_t driver_version;
    uint32_t hold;              /* while 1, no copy starts; 2: no stream write either */
    uint32_t delay_us_max;      /* before every operation of a stream, at random */
    uint32_t piece_bytes;       /* copies go piece by piece, in any order; 0: whole */
    uint32_t batch_descriptors_max;
    uint32_t break_batches;     /* 1: a batch reports success and copies wrong bytes */
    uint32_t no_stream_writes;  /* the device lacks 64-bit stream memory operations */
    uint32_t seed;
    uint32_t break_planes;      /* 1: the same of a 2D copy */
    uint32_t clock_mb_per_s;    /* copies between host and device take their time at this rate, and
                                 * move nothing; each stream is a copy engine. 0: they move bytes */
    char device_names[DEVICES_MAX][NAME_BYTES];
    struct fault faults[FAULTS_MAX];
    struct process processes[PROCESSES_MAX];
};

#endif
