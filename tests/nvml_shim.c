/* NVML without a GPU: answers as the lines of the file named by NVML_SHIM say, read anew for each
 * call. A line is "key value"; "1.key value" is about GPU 1 alone. Keys that are not there have the
 * default given where they are used. "fail FUNCTION CODE" makes a function return that code,
 * "lost N" makes every call about a GPU after the N-th say that it is lost, "hang FUNCTION MS"
 * makes one slow, "1.gone 1" says that GPU 1 is lost. GPUs number "count" and above are MIG slices
 * of GPU 0: known by UUID only.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, LOST = 15, UNKNOWN = 999 };
enum { MOST = 8, LINE = 512, METRICS = 32 };
typedef unsigned long long u64;
typedef struct { int index; } Gpu;
static Gpu gpus[MOST] = {{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}};

static int find(const char *key, char *value) {
    const char *path = getenv("NVML_SHIM");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[LINE];
    size_t length = strlen(key);
    int found = 0;
    while (file && !found && fgets(line, LINE, file)) {
        line[strcspn(line, "\n")] = 0;
        if (!strncmp(line, key, length) && line[length] == ' ') {
            strcpy(value, line + length + 1);
            found = 1;
        }
    }
    if (file) fclose(file);
    return found;
}

static int text(const Gpu *gpu, const char *key, char *value) {
    char own[LINE];
    snprintf(own, LINE, "%d.%s", gpu->index, key);
    return find(own, value) || find(key, value);
}

static double number(const Gpu *gpu, const char *key, double otherwise) {
    char value[LINE];
    return text(gpu, key, value) ? atof(value) : otherwise;
}

static double setting(const char *key, double otherwise) {
    char value[LINE];
    return find(key, value) ? atof(value) : otherwise;
}

static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return now.tv_sec + now.tv_nsec / 1e9;
}

static int gate(const char *function) {
    char key[LINE];
    snprintf(key, LINE, "hang %s", function);
    double hang_ms = setting(key, 0);
    if (hang_ms > 0) usleep((useconds_t)(1000 * hang_ms));
    snprintf(key, LINE, "fail %s", function);
    return (int)setting(key, OK);
}

static int ask(const char *function) {
    static int calls = 0;
    if (++calls > setting("lost", 1e9)) return LOST;
    return gate(function);
}

#define GATE { int code = gate(__func__); if (code) return code; }
#define ASK { int code = ask(__func__); if (code) return code; }
#define WHOLE { ASK if (number(gpu, "gone", 0)) return LOST; if (gpu->index >= setting("count", 1)) return NOT_SUPPORTED; }

int nvmlInitWithFlags(unsigned flags) { (void)flags; GATE return OK; }
int nvmlInit_v2(void) { GATE return OK; }
int nvmlInit(void) { GATE return OK; }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { return code == 18 ? "Driver/library version mismatch" : "some error"; }

static int put(char *to, unsigned size, const Gpu *gpu, const char *key, const char *otherwise) {
    char value[LINE];
    snprintf(to, size, "%s", text(gpu, key, value) ? value : otherwise);
    return OK;
}

int nvmlSystemGetDriverVersion(char *to, unsigned size) { GATE return put(to, size, gpus, "driver", "550.54.15"); }
int nvmlSystemGetNVMLVersion(char *to, unsigned size) { GATE return put(to, size, gpus, "nvml", "12.550.54"); }

int nvmlDeviceGetCount_v2(unsigned *count) { GATE *count = (unsigned)setting("count", 1); return OK; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Gpu **gpu) {
    ASK
    if (index >= setting("count", 1)) return INVALID;
    *gpu = &gpus[index];
    return OK;
}

static int search(const char *key, const char *wanted, Gpu **gpu) {
    char value[LINE];
    for (int index = 0; index < MOST; index++) {
        char own[LINE];
        snprintf(own, LINE, "%d.%s", index, key);
        if (find(own, value) && !strcmp(value, wanted)) {
            *gpu = &gpus[index];
            return OK;
        }
    }
    return NOT_FOUND;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, Gpu **gpu) { ASK return search("uuid", uuid, gpu); }
int nvmlDeviceGetHandleByPciBusId_v2(const char *pci, Gpu **gpu) { ASK return search("pci", pci, gpu); }
int nvmlDeviceGetUUID(const Gpu *gpu, char *to, unsigned size) { ASK return put(to, size, gpu, "uuid", "GPU-0"); }
int nvmlDeviceGetName(const Gpu *gpu, char *to, unsigned size) { ASK return put(to, size, gpu, "name", "Made Up"); }

int nvmlDeviceIsMigDeviceHandle(const Gpu *gpu, unsigned *is) { ASK *is = gpu->index >= setting("count", 1); return OK; }
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(const Gpu *gpu, Gpu **whole) { (void)gpu; ASK *whole = gpus; return OK; }
int nvmlDeviceGetGpuInstanceId(const Gpu *gpu, unsigned *id) { ASK *id = 6 + (unsigned)gpu->index; return OK; }
int nvmlDeviceGetMigMode(const Gpu *gpu, unsigned *now, unsigned *next) {
    WHOLE
    *now = *next = (unsigned)number(gpu, "mig", 0);
    return OK;
}

typedef struct { unsigned gpu, memory; } Rates;
int nvmlDeviceGetUtilizationRates(const Gpu *gpu, Rates *rates) {
    WHOLE
    rates->gpu = (unsigned)number(gpu, "util", 80);
    rates->memory = (unsigned)number(gpu, "memory_util", 40);
    return OK;
}

/* "samples 150:30 50:90": 30 % told 150 ms ago, 90 % told 50 ms ago; "samples_on" is which kind. */
typedef struct { u64 at_us; union { double d; unsigned ui; u64 ull; } value; } Sample;
int nvmlDeviceGetSamples(const Gpu *gpu, int kind, u64 since_us, int *type, unsigned *count, Sample *samples) {
    WHOLE
    char list[LINE], key[LINE];
    snprintf(key, LINE, "samples%d", kind);
    if (!text(gpu, key, list)) return NOT_SUPPORTED;
    u64 now_us = (u64)(1e6 * now_s());
    unsigned found = 0, room = *count;
    for (char *one = strtok(list, " "); one; one = strtok(NULL, " ")) {
        double age_ms = atof(one), value = atof(strchr(one, ':') + 1);
        u64 at_us = now_us - (u64)(1000 * age_ms);
        if (at_us <= since_us) continue;
        if (samples && found < room) {
            samples[found].at_us = at_us;
            samples[found].value.ui = (unsigned)value;
        }
        found++;
    }
    *type = 1;
    *count = found;
    return found ? OK : NOT_FOUND;
}

int nvmlDeviceGetPowerUsage(const Gpu *gpu, unsigned *milliwatts) { WHOLE *milliwatts = (unsigned)(1000 * number(gpu, "watts", 300)); return OK; }
int nvmlDeviceGetEnforcedPowerLimit(const Gpu *gpu, unsigned *milliwatts) { ASK *milliwatts = (unsigned)(1000 * number(gpu, "limit", 700)); return OK; }
int nvmlDeviceGetPersistenceMode(const Gpu *gpu, unsigned *on) { ASK *on = (unsigned)number(gpu, "persistent", 1); return OK; }

/* Grows by so many watts, in ticks of "tick_ms". */
int nvmlDeviceGetTotalEnergyConsumption(const Gpu *gpu, u64 *millijoules) {
    WHOLE
    static double started_s = 0;
    if (!started_s) started_s = now_s() - 1000;
    double tick_s = number(gpu, "tick_ms", 100) / 1000;
    *millijoules = (u64)(1000 * number(gpu, "watts", 300) * tick_s * floor((now_s() - started_s) / tick_s));
    return OK;
}

int nvmlDeviceGetClockInfo(const Gpu *gpu, int kind, unsigned *mhz) { ASK *mhz = (unsigned)number(gpu, kind == 1 ? "sm_mhz" : "memory_mhz", kind == 1 ? 1980 : 2619); return OK; }
int nvmlDeviceGetCurrentClocksEventReasons(const Gpu *gpu, u64 *reasons) { ASK *reasons = (u64)number(gpu, "reasons", 4); return OK; }
int nvmlDeviceGetCurrentClocksThrottleReasons(const Gpu *gpu, u64 *reasons) { ASK *reasons = (u64)number(gpu, "reasons", 4); return OK; }

typedef struct { unsigned version; int sensor; int degrees; } Temperature;
int nvmlDeviceGetTemperatureV(const Gpu *gpu, Temperature *told) { ASK told->degrees = (int)number(gpu, "degrees", 61); return OK; }
int nvmlDeviceGetTemperature(const Gpu *gpu, int sensor, unsigned *degrees) { (void)sensor; ASK *degrees = (unsigned)number(gpu, "degrees", 61); return OK; }

int nvmlDeviceGetPcieThroughput(const Gpu *gpu, int counter, unsigned *kilobytes) {
    WHOLE
    usleep(20000);
    *kilobytes = (unsigned)(1024 * number(gpu, counter ? "received" : "sent", counter ? 900 : 100));
    return OK;
}

typedef struct { u64 total, free, used; } Memory1;
typedef struct { unsigned version; u64 total, reserved, free, used; } Memory2;
int nvmlDeviceGetMemoryInfo(const Gpu *gpu, Memory1 *memory) {
    ASK
    memory->total = (u64)number(gpu, "total", 80e9);
    memory->used = (u64)(number(gpu, "used", 4e6) + number(gpu, "reserved", 6e8));
    memory->free = memory->total - memory->used;
    return OK;
}
int nvmlDeviceGetMemoryInfo_v2(const Gpu *gpu, Memory2 *memory) {
    ASK
    memory->total = (u64)number(gpu, "total", 80e9);
    memory->reserved = (u64)number(gpu, "reserved", 6e8);
    memory->used = (u64)number(gpu, "used", 4e6);
    memory->free = memory->total - memory->used - memory->reserved;
    return OK;
}

/* "processes 4711:7e9 4712:?": process 4711 holds 7 GB, what 4712 holds is not told. */
typedef struct { unsigned pid; u64 bytes; unsigned instance, compute; } Process;
static int listed(const Gpu *gpu, unsigned *count, Process *processes) {
    char list[LINE];
    unsigned found = 0, room = *count;
    if (text(gpu, "processes", list)) {
        for (char *one = strtok(list, " "); one; one = strtok(NULL, " ")) {
            const char *held = strchr(one, ':') + 1;
            if (processes && found < room) {
                processes[found].pid = (unsigned)atoi(one);
                processes[found].bytes = *held == '?' ? ~0ULL : (u64)atof(held);
            }
            found++;
        }
    }
    *count = found;
    return found > room ? TOO_SMALL : OK;
}
int nvmlDeviceGetComputeRunningProcesses_v3(const Gpu *gpu, unsigned *count, Process *processes) { ASK return listed(gpu, count, processes); }
int nvmlDeviceGetComputeRunningProcesses_v2(const Gpu *gpu, unsigned *count, Process *processes) { ASK return listed(gpu, count, processes); }

/* "busy 4711:30": process 4711 has used 30 % of the SMs just now. */
typedef struct { unsigned pid; u64 at_us; unsigned sm, memory, encoder, decoder; } Use;
int nvmlDeviceGetProcessUtilization(const Gpu *gpu, Use *uses, unsigned *count, u64 since_us) {
    WHOLE
    char list[LINE];
    (void)since_us;
    unsigned found = 0, room = *count;
    if (!text(gpu, "busy", list)) return NOT_FOUND;
    for (char *one = strtok(list, " "); one; one = strtok(NULL, " ")) {
        if (uses && found < room) {
            Use use = {(unsigned)atoi(one), (u64)(1e6 * now_s()), (unsigned)atof(strchr(one, ':') + 1), 0, 0, 0};
            uses[found] = use;
        }
        found++;
    }
    *count = found;
    return found > room ? TOO_SMALL : OK;
}

/* GPM counts: a sample holds the integral of every metric, and their quotient with time is told. */
typedef struct { double at_s, counted[METRICS]; } Counted;
typedef struct { unsigned id; int code; double value; char *names[3]; } Metric;
typedef struct { unsigned version, count; Counted *first, *second; Metric metrics[1]; } Metrics;
typedef struct { unsigned version, supported; } Support;

int nvmlGpmQueryDeviceSupport(const Gpu *gpu, Support *support) { WHOLE support->supported = (unsigned)number(gpu, "gpm", 1); return OK; }
int nvmlGpmSampleAlloc(Counted **counted) { GATE *counted = calloc(1, sizeof(Counted)); return OK; }
int nvmlGpmSampleFree(Counted *counted) { free(counted); return OK; }

static int take(const Gpu *gpu, Counted *counted) {
    static Counted now[MOST];
    Counted *total = &now[gpu->index];
    double at_s = now_s(), length_s = total->at_s ? at_s - total->at_s : 0;
    for (int id = 0; id < METRICS; id++) {
        char key[LINE];
        snprintf(key, LINE, "gpm%d", id);
        total->counted[id] += length_s * number(gpu, key, id);
    }
    total->at_s = at_s;
    *counted = *total;
    return OK;
}
int nvmlGpmSampleGet(const Gpu *gpu, Counted *counted) { WHOLE return take(gpu, counted); }
int nvmlGpmMigSampleGet(const Gpu *gpu, unsigned instance, Counted *counted) {
    WHOLE
    return take(&gpus[instance - 6], counted);
}
int nvmlGpmMetricsGet(Metrics *asked) {
    ASK
    double length_s = asked->second->at_s - asked->first->at_s;
    if (asked->version != 1 || length_s < setting("least_pair_ms", 100) / 1000) return UNKNOWN;
    for (unsigned place = 0; place < asked->count; place++) {
        Metric *metric = &asked->metrics[place];
        char key[LINE];
        snprintf(key, LINE, "without %u", metric->id);
        metric->code = setting(key, 0) ? NOT_SUPPORTED : OK;
        metric->value = (asked->second->counted[metric->id] - asked->first->counted[metric->id]) / length_s;
    }
    return OK;
}
