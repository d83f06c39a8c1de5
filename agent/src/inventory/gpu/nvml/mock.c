/* A libnvidia-ml of a machine that does not exist, for tests: four GPUs, the first two joined by NVLink, the third in MIG mode with one slice,
 * the fourth lost. Compiled with INIT_RESULT it fails to start, with OLD it lacks what drivers before 510 lack. Layouts are those of nvml.h. */
#include <stdio.h>
#include <string.h>

#ifndef INIT_RESULT
#define INIT_RESULT 0
#endif

typedef int Result;
typedef void *Device;
typedef unsigned long long U64;
enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, LOST = 15 };

/* Handles: 1 to 4 are GPUs, 31 is the slice of the third. */
static long at(Device device) { return (long)device; }
static int is_slice(Device device) { return at(device) == 31; }

Result nvmlInit_v2(void) { return INIT_RESULT; }
Result nvmlShutdown(void) { return OK; }

Result nvmlSystemGetDriverVersion(char *text, unsigned size) {
    snprintf(text, size, "580.95.05");
    return OK;
}
Result nvmlSystemGetCudaDriverVersion(int *version) { *version = 13010; return OK; }
Result nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13010; return OK; }

Result nvmlDeviceGetCount_v2(unsigned *count) { *count = 4; return OK; }
Result nvmlDeviceGetHandleByIndex_v2(unsigned index, Device *device) {
    if (index == 3) return LOST;
    *device = (Device)(long)(index + 1);
    return OK;
}
Result nvmlDeviceGetUUID(Device device, char *text, unsigned size) {
    snprintf(text, size, is_slice(device) ? "MIG-mock-%ld" : "GPU-mock-%ld", at(device));
    return OK;
}
Result nvmlDeviceGetName(Device device, char *text, unsigned size) {
    snprintf(text, size, is_slice(device) ? "NVIDIA H100 80GB HBM3 MIG 1g.10gb" : "NVIDIA H100 80GB HBM3");
    return OK;
}
typedef struct { U64 total, free, used; } Memory;
Result nvmlDeviceGetMemoryInfo(Device device, Memory *memory) {
    (void)device;
    memory->total = 85520809984ULL;
    memory->used = 494927872ULL;
    memory->free = memory->total - memory->used;
    return OK;
}
#ifndef OLD
typedef struct { unsigned version; U64 total, reserved, free, used; } Memory2;
Result nvmlDeviceGetMemoryInfo_v2(Device device, Memory2 *memory) {
    if (memory->version != (sizeof(Memory2) | 2 << 24)) return INVALID;
    memory->total = is_slice(device) ? 10468982784ULL : 85520809984ULL;
    memory->reserved = 502267904ULL;
    memory->used = at(device) == 2 ? 2684354560ULL : 0;
    memory->free = memory->total - memory->reserved - memory->used;
    return OK;
}
#endif
Result nvmlDeviceGetCudaComputeCapability(Device device, int *major, int *minor) {
    (void)device;
    *major = 9;
    *minor = 0;
    return OK;
}
typedef struct {
    char old_id[16];
    unsigned domain, bus, device, pci_device_id, pci_subsystem_id;
    char id[32];
} Pci;
static void pci_of(long gpu, Pci *pci) {
    memset(pci, 0, sizeof *pci);
    pci->bus = 0x10 + (unsigned)gpu;
    snprintf(pci->id, sizeof pci->id, "00000000:%02X:00.0", pci->bus);
}
Result nvmlDeviceGetPciInfo_v3(Device device, Pci *pci) { pci_of(at(device), pci); return OK; }
Result nvmlDeviceGetTotalEccErrors(Device device, int kind, int counter, U64 *count) {
    /* kind 1 is uncorrected, counter 1 the aggregate. */
    *count = kind == 1 && at(device) == 2 ? (counter == 1 ? 12 : 4) : 0;
    return OK;
}
Result nvmlDeviceGetRemappedRows(Device device, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
    *corrected = *uncorrected = *failed = 0;
    *pending = at(device) == 2;
    return OK;
}
Result nvmlDeviceGetMigMode(Device device, unsigned *current, unsigned *pending) {
    *current = *pending = at(device) == 3;
    return OK;
}
Result nvmlDeviceGetMigDeviceHandleByIndex(Device device, unsigned place, Device *slice) {
    if (at(device) != 3) return NOT_SUPPORTED;
    if (place >= 7) return INVALID;
    if (place != 2) return NOT_FOUND;
    *slice = (Device)31L;
    return OK;
}
Result nvmlDeviceGetP2PStatus(Device first, Device second, int what, int *status) {
    if (what != 2) return INVALID;
    *status = at(first) + at(second) == 3 ? 0 : 5;
    return OK;
}
Result nvmlDeviceGetNvLinkState(Device device, unsigned link, int *active) {
    if (at(device) == 3) return NOT_SUPPORTED;
    if (link >= 18) return INVALID;
    *active = link < 4;
    return OK;
}
Result nvmlDeviceGetNvLinkRemotePciInfo_v2(Device device, unsigned link, Pci *pci) {
    (void)link;
    pci_of(3 - at(device), pci);
    return OK;
}
Result nvmlDeviceGetNvLinkRemoteDeviceType(Device device, unsigned link, unsigned *type) {
    (void)device;
    (void)link;
    *type = 0;
    return OK;
}
typedef struct { unsigned pid; U64 used; unsigned gpu_instance, compute_instance; } Process;
#ifdef OLD
Result nvmlDeviceGetComputeRunningProcesses_v2(Device device, unsigned *count, Process *processes) {
#else
Result nvmlDeviceGetComputeRunningProcesses_v3(Device device, unsigned *count, Process *processes) {
#endif
    unsigned there = at(device) == 2;
    if (*count < there) {
        *count = there;
        return TOO_SMALL;
    }
    if (there && processes) processes[0] = (Process){4711, 2684354560ULL, ~0u, ~0u};
    *count = there;
    return OK;
}
#ifndef OLD
typedef struct {
    unsigned id, scope;
    long long timestamp, latency;
    int type, result;
    union { double d; unsigned u; U64 l; } value;
} Field;
Result nvmlDeviceGetFieldValues(Device device, int count, Field *fields) {
    for (int i = 0; i < count; i++) {
        fields[i].result = fields[i].id == 230 ? OK : NOT_SUPPORTED;
        fields[i].type = 1;
        fields[i].value.u = at(device) == 2 ? 4 : 0;
    }
    return OK;
}
typedef struct {
    unsigned version;
    unsigned char cluster[16];
    int status;
    unsigned clique;
    unsigned char state;
    unsigned health;
} Fabric;
Result nvmlDeviceGetGpuFabricInfoV(Device device, Fabric *fabric) {
    (void)device;
    if (fabric->version != (sizeof(Fabric) | 2 << 24)) return INVALID;
    memset(fabric->cluster, 0xab, sizeof fabric->cluster);
    fabric->status = OK;
    fabric->clique = 4026;
    fabric->state = 3;
    return OK;
}
#else
typedef struct { unsigned char cluster[16]; int status; unsigned clique; unsigned char state; } OldFabric;
Result nvmlDeviceGetGpuFabricInfo(Device device, OldFabric *fabric) {
    (void)device;
    memset(fabric, 0, sizeof *fabric);
    fabric->state = 3;
    return OK;
}
#endif
