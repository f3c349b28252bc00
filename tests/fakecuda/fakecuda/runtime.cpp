// CUDA's driver and the part of its runtime that CuPy calls, with the processor as the device.
//
// `libcuda.so.1` is this file.  CuPy's wheel contains a static copy of the runtime; `installation.py` writes jumps over its functions,
// to the `fake_cuda*` functions here.  A function without an implementation fails with its name (`build.py` writes it).
//
// Memory: each allocation ends at the end of a page, and the page after it cannot be accessed, so that an index one too far
// faults.  A write before an allocation is found when it is freed.  New memory contains 0xCD.  The fault of a kernel becomes error 700, which stays until `fake_reset`, as on a device.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <csetjmp>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <sys/mman.h>
#include <vector>

#include "kernel.h"
#include "library.h"
#include "streams.h"

namespace {

enum Count { LAUNCHES, PRODUCTS, TO_HOST, TO_DEVICE, ON_DEVICE, BETWEEN_DEVICES, MEMSETS, SYNCHRONIZATIONS, EVENTS, ALLOCATIONS,
             TO_HOST_BYTES, TO_DEVICE_BYTES, BETWEEN_DEVICES_BYTES, FOREIGN, RACES, UNORDERED, HOST_POINTERS, MEMORY_QUERIES, KERNEL_BYTES,
             GRAPHS, GRAPH_NODES, COUNTS };

struct Block {  // an allocation
    char* start;
    size_t size;
    char* mapping;
    size_t mapped;
    int device;  // -1: pinned memory of the host
};

std::atomic<long> counts[COUNTS];
std::recursive_mutex lock;
std::map<char*, Block> blocks;  // by start
const int MOST_DEVICES = 16;
size_t used[MOST_DEVICES];
thread_local int current = 0;
int fault = 0;
std::string report;  // what was wrong, one line each

int number(const char* name, int otherwise) {
    const char* text = getenv(name);
    return text && *text ? atoi(text) : otherwise;
}
const bool null_device = number("FAKECUDA_NULL", 0);  // launches are counted and not executed
int device_count() { return std::min(number("FAKECUDA_DEVICES", 2), MOST_DEVICES); }
size_t capacity() { return size_t(number("FAKECUDA_MEMORY_MIB", 8192)) << 20; }

void note(const std::string& line) {
    if (report.size() < 100000) report += line + "\n";
}

// The work that began on a stream uses an array.
void note_use(const Block& block, const std::string& what, Stream& stream, bool writes) {
    const std::string wrong = use(block.start, what, stream, writes);
    if (!wrong.empty()) counts[UNORDERED]++, note(wrong);
}

void note_foreign(const std::string& what, int device) {
    counts[FOREIGN]++;
    note(what + ": device " + std::to_string(current) + " was current, an array is on device " + std::to_string(device));
}

const Block* block_of(const void* address) {
    auto next = blocks.upper_bound((char*)address);
    if (next == blocks.begin()) return nullptr;
    const Block& block = std::prev(next)->second;
    return (char*)address < block.start + (block.size ? block.size : 1) ? &block : nullptr;
}

}  // namespace
#include "capture.h"
namespace {

int allocate(void** result, size_t size, int device) {
    std::lock_guard<std::recursive_mutex> hold(lock);
    *result = nullptr;
    if (fault) return fault;
    if (int error = unsafe("an allocation")) return error;
    if (!size) return 0;
    if (device >= 0 && used[device] + size > capacity()) return cudaErrorMemoryAllocation;
    const size_t page = 4096, whole = (size + page - 1) / page * page;
    char* mapping = (char*)mmap(nullptr, whole + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapping == MAP_FAILED) return cudaErrorMemoryAllocation;
    mprotect(mapping + whole, page, PROT_NONE);
    char* start = mapping + whole - size;
    if (!null_device) memset(mapping, 0xCD, whole);
    blocks[start] = {start, size, mapping, whole + page, device};
    if (device >= 0) used[device] += size;
    counts[ALLOCATIONS]++;
    *result = start;
    return 0;
}

int release(void* address) {
    std::lock_guard<std::recursive_mutex> hold(lock);
    if (!address) return 0;
    if (int error = unsafe("a release of memory")) return error;
    auto found = blocks.find((char*)address);
    if (found == blocks.end()) return cudaErrorInvalidValue;
    const Block block = found->second;
    if (block.device >= 0) used[block.device] -= block.size;
    for (const char* p = block.mapping; p < block.start && !null_device; p++)
        if (*p != (char)0xCD) {
            note("the memory before an array of " + std::to_string(block.size) + " bytes was written");
            break;
        }
    uses.erase(block.start);
    freed(block);
    for (const Stream* stream : streams)
        for (const Upload& u : stream->uploads)
            if (u.from >= block.start && u.from < block.start + block.size) note("pinned memory was released before a copy from it was made");
    for (Stream* stream : streams) stream->uploads.erase(std::remove_if(stream->uploads.begin(), stream->uploads.end(),
        [&](const Upload& u) { return (u.from >= block.start && u.from < block.start + block.size) || (u.to >= block.start && u.to < block.start + block.size); }), stream->uploads.end());
    munmap(block.mapping, block.mapped);
    blocks.erase(found);
    return 0;
}

extern "C" { __attribute__((visibility("default"))) int fake_late = 1; }  // when copies from pinned memory read their source

int copy(Stream& stream, void* to, const void* from, size_t size, int kind, bool waits) {
    std::lock_guard<std::recursive_mutex> hold(lock);
    if (fault) return fault;
    const Block *target = block_of(to), *source = block_of(from);
    const int there = target ? target->device : -1, here = source ? source->device : -1;
    const int wanted = here < 0 ? (there < 0 ? cudaMemcpyHostToHost : cudaMemcpyHostToDevice)
                                : (there < 0 ? cudaMemcpyDeviceToHost : cudaMemcpyDeviceToDevice);
    if (size && kind != cudaMemcpyDefault && kind != wanted) {
        note("a copy was declared as kind " + std::to_string(kind) + ", but its addresses are of kind " + std::to_string(wanted));
        return cudaErrorInvalidMemcpyDirection;
    }
    if ((target && (char*)to + size > target->start + target->size) || (source && (char*)from + size > source->start + source->size)) {
        note("a copy of " + std::to_string(size) + " bytes passes the end of its allocation");
        return cudaErrorInvalidValue;
    }
    if (wanted == cudaMemcpyHostToDevice) counts[TO_DEVICE]++, counts[TO_DEVICE_BYTES] += size;
    if (wanted == cudaMemcpyDeviceToHost) counts[TO_HOST]++, counts[TO_HOST_BYTES] += size;
    if (wanted == cudaMemcpyDeviceToDevice && !replaying) {
        if (here == there) counts[ON_DEVICE]++;
        else counts[BETWEEN_DEVICES]++, counts[BETWEEN_DEVICES_BYTES] += size;
    }
    // It would be in the order of the current device's work, not of the work on these arrays.
    const int device = there < 0 ? here : there;
    if (device >= 0 && here != current && there != current) note_foreign("a copy", device);
    if (null_device && wanted == cudaMemcpyDeviceToDevice) spend({"a copy", 1, 2.0 * size}, false);
    if (null_device && wanted == cudaMemcpyDeviceToHost) memset(to, 0xFF, size);  // so that the flags of checks are clear
    if (null_device && wanted != cudaMemcpyHostToHost) return 0;
    if (!size || wanted == cudaMemcpyHostToHost) {
        memmove(to, from, size);
        return 0;
    }
    begin(stream);
    if (source && here >= 0) note_use(*source, "a copy", stream, false);
    if (target && there >= 0) note_use(*target, "a copy", stream, true);
    const bool pinned = (there < 0 && target) || (here < 0 && source);
    if (!waits && pinned && there < 0) {
        stream.deliveries.push_back({(char*)to, std::string((const char*)from, size), stream.time});
        memset(to, 0xCD, size);
        return 0;
    }
    if (!waits && pinned && here < 0 && fake_late) {
        stream.uploads.push_back({(char*)to, (char*)from, size});
        return 0;
    }
    memmove(to, from, size);
    if (waits || there < 0) host_waits_for(stream);  // a copy to memory that is not pinned is finished when the call returns
    return 0;
}

// An asynchronous copy, which a capturing stream records.
int copy_later(void* to, const void* from, size_t size, int kind, void* handle) {
    std::lock_guard<std::recursive_mutex> hold(lock);
    Stream& stream = *stream_of(handle, current);
    if (!stream.capture) {
        if (int error = outside(stream, "a copy")) return error;
        return copy(stream, to, from, size, kind, false);
    }
    const Block *target = block_of(to), *source = block_of(from);
    if (!source || source->device < 0) return refuse(*stream.capture, source ? "a copy from pinned memory" : "a copy from pageable memory");
    if (!target || target->device < 0) return refuse(*stream.capture, target ? "a copy to pinned memory" : "a copy to pageable memory");
    return record(stream, {{"a copy", 1, 2.0 * size}, {from, to}, [=](Stream& on) { return copy(on, to, from, size, kind, false); }});
}

// A copy that is finished when the call returns.
int copy_now(void* to, const void* from, size_t size, int kind) {
    std::lock_guard<std::recursive_mutex> hold(lock);
    if (int error = waits_for_all(current, "a synchronous copy", true)) return error;
    return copy(*default_stream(current), to, from, size, kind, true);
}

int fill(Stream& stream, void* to, int value, size_t size) {
    std::lock_guard<std::recursive_mutex> hold(lock);
    if (fault || !size) return fault;
    const Block* block = block_of(to);
    if (!block || (char*)to + size > block->start + block->size) {
        note("a memset of " + std::to_string(size) + " bytes passes the end of its allocation");
        return cudaErrorInvalidValue;
    }
    if (block->device >= 0 && block->device != current) note_foreign("a memset", block->device);
    if (!replaying) counts[MEMSETS]++;
    begin(stream);
    note_use(*block, "a memset", stream, true);
    if (null_device) spend({"a memset", 1, double(size)}, false);
    else memset(to, value, size);
    return 0;
}
int fill_later(void* to, int value, size_t size, void* handle) {
    std::lock_guard<std::recursive_mutex> hold(lock);
    Stream& stream = *stream_of(handle, current);
    if (stream.capture) return record(stream, {{"a memset", 1, double(size)}, {to}, [=](Stream& on) { return fill(on, to, value, size); }});
    if (int error = outside(stream, "a memset")) return error;
    return fill(stream, to, value, size);
}

int synchronize(const Clock& clock) {
    counts[SYNCHRONIZATIONS]++;
    host_waits(clock);
    return fault;
}

// Faults of kernels.  One thread launches at a time; its fault returns to `run`.
sigjmp_buf landing;
volatile sig_atomic_t landing_set = 0;
void* fault_address;
struct sigaction before[NSIG];

void on_fault(int signal, siginfo_t* info, void* context) {
    if (landing_set) {
        fault_address = info->si_addr;
        siglongjmp(landing, signal);
    }
    sigaction(signal, &before[signal], nullptr);  // not ours: the fault repeats under the previous handler
    (void)context;
}

void watch_faults() {
    for (int signal : {SIGSEGV, SIGBUS, SIGFPE}) {
        struct sigaction now;
        sigaction(signal, nullptr, &now);
        if (now.sa_flags & SA_SIGINFO && now.sa_sigaction == on_fault) continue;
        before[signal] = now;
        struct sigaction mine = {};
        mine.sa_sigaction = on_fault;
        mine.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
        sigaction(signal, &mine, nullptr);
    }
}

std::map<char*, Block>* launched;  // the arrays of the present launch

}  // namespace
#include "watch.h"
namespace {

// Runs a kernel once; its threads and blocks in ascending or descending order.  Its failure becomes the fault of the device.
void run(const FakeKernel& kernel, FakeLaunch launch, void** arguments, bool descending) {
    launch.descending = descending;
    watch_faults();
    int signal = sigsetjmp(landing, 1);
    if (!signal) {
        landing_set = 1;
        const char* failure = kernel.run(launch, arguments);
        landing_set = 0;
        if (failure) {
            note(std::string(kernel.name) + ": " + failure);
            fault = cudaErrorLaunchFailure;
        }
        return;
    }
    landing_set = 0;
    char text[300];
    if (signal == SIGFPE) snprintf(text, sizeof text, "%s: an integer was divided by zero; a device's result is undefined", kernel.name);
    else {
        const Block* near = block_of((char*)fault_address - 1);  // the page after an allocation
        snprintf(text, sizeof text, "%s: an access outside its arrays%s", kernel.name, near ? ", past the end of one" : "");
    }
    note(text);
    fault = cudaErrorIllegalAddress;
}

}  // namespace

EXPORT long fake_count(int which) { return counts[which]; }
EXPORT long fake_used(int device) { return used[device]; }
EXPORT void fake_reset() {
    std::lock_guard<std::recursive_mutex> hold(lock);
    fault = 0;
    report.clear();
    for (auto& count : counts) count = 0;
}
// The lines about foreign arrays, races and faults since the last call.  The text is valid until the next call.
EXPORT const char* fake_report() {
    static std::string text;
    std::lock_guard<std::recursive_mutex> hold(lock);
    text.swap(report);
    report.clear();
    return text.c_str();
}
// Whether the null device keeps a line for each work: whether a graph contains it, its kernels, bytes, operations and name.
EXPORT void fake_log(int on) {
    std::lock_guard<std::recursive_mutex> hold(lock);
    logs = on, work.clear();
}
EXPORT const char* fake_work() { return work.c_str(); }
extern "C" { __attribute__((visibility("default"))) int fake_order = 0; }  // 0: threads in ascending order; 1: descending; 2: both, and equal bits are required

namespace {
// Work of a library's function, whose last array is its result.
int run_call(const FakeCall& call, Stream& stream) {
    {
        std::lock_guard<std::recursive_mutex> hold(lock);
        if (fault) return fault;
        for (const void* address : call.arrays) {
            const Block* block = block_of(address);
            if (block && block->device >= 0 && block->device != current) note_foreign(call.name, block->device);
        }
        begin(stream);
        for (const void* address : call.arrays)
            if (const Block* block = block_of(address)) note_use(*block, call.name, stream, address == call.arrays.back());
        if (const Block* block = block_of(call.workspace)) note_use(*block, std::string(call.name) + ", in its workspace,", stream, true);
    }
    return call.compute ? call.compute() : 0;
}
Work work_of(const FakeCall& call) {
    Work result{call.name, std::max(call.kernels, 1), call.bytes, call.flops};
    if (call.bytes >= 0) return result;
    std::set<const void*> seen;
    result.bytes = 0;
    for (const void* address : call.arrays)
        if (const Block* block = block_of(address))
            if (seen.insert(block->start).second) result.bytes += block->size;
    return result;
}
}  // namespace

EXPORT int fake_call(const FakeCall& call) {
    {
        std::lock_guard<std::recursive_mutex> hold(lock);
        Stream& stream = *stream_of(call.stream, current);
        if (stream.capture) {
            if (!call.capturable) return refuse(*stream.capture, call.name);
            std::vector<const void*> used = call.arrays;
            used.push_back(call.workspace);
            return record(stream, {work_of(call), used, [call](Stream& on) { return run_call(call, on); }});
        }
        if (int error = outside(stream, call.name)) return error;
        counts[call.product ? PRODUCTS : LAUNCHES] += call.kernels;
        if (null_device) return spend(work_of(call), false), 0;
    }
    return run_call(call, *stream_of(call.stream, current));
}
// The same for host.py, which computes by itself, without `compute`, if the result is 0; 1: nothing is to be computed.
EXPORT int fake_host_call(void* stream, const char* name, const void* const* arrays, int count, int kernels, double bytes, void (*compute)()) {
    FakeCall call{name, stream, std::vector<const void*>(arrays, arrays + count)};
    call.kernels = kernels, call.bytes = bytes;
    if (compute) call.compute = [compute] { return compute(), 0; };
    const int error = fake_call(call);
    return error || null_device || compute ? error + 1 : 0;
}
EXPORT int fake_capturing(void* handle) {
    std::lock_guard<std::recursive_mutex> hold(lock);
    return stream_of(handle, current)->capture != nullptr;
}
EXPORT void fake_trap(const char* name) {
    fprintf(stderr, "fakecuda: %s has no stand-in\n", name);
    std::lock_guard<std::recursive_mutex> hold(lock);
    note(std::string(name) + ": has no stand-in");
}

// ---- Arithmetic of kernels (device.h): instructions that keep subnormal float32 numbers, and functions that flush them
EXPORT float fake_ptx_add(float a, float b) { return a + b; }
EXPORT float fake_ptx_sub(float a, float b) { return a - b; }
EXPORT float fake_ptx_mul(float a, float b) { return a * b; }
EXPORT int fake_ptx_ge(float a, float b) { return a >= b; }
static float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }
// As PTX defines them, +0.0 is larger than -0.0; C leaves it open, and g++'s result depends on the order of registers.
static float smallest(float x, float y) { return x == y ? (std::signbit(x) ? x : y) : std::fmin(x, y); }
static float largest(float x, float y) { return x == y ? (std::signbit(x) ? y : x) : std::fmax(x, y); }
#define fminf smallest
#define fmaxf largest
#define UNARY(name) EXPORT float __wrap_##name(float x) { return flushed(name(flushed(x))); }
#define BINARY(name) EXPORT float __wrap_##name(float x, float y) { return flushed(name(flushed(x), flushed(y))); }
#include "functions.h"
#undef fminf
#undef fmaxf
EXPORT float __wrap_fmaf(float x, float y, float z) { return flushed(fmaf(flushed(x), flushed(y), flushed(z))); }
EXPORT float __wrap_ldexpf(float x, int n) { return flushed(ldexpf(flushed(x), n)); }
EXPORT float __wrap_scalbnf(float x, int n) { return flushed(scalbnf(flushed(x), n)); }
EXPORT float __wrap_frexpf(float x, int* n) { return frexpf(flushed(x), n); }
EXPORT float __wrap_modff(float x, float* whole) { return flushed(modff(flushed(x), whole)); }

// ---- The runtime
#define RUNTIME(name) EXPORT int fake_##name
static int available() {
    if (!number("FAKECUDA_DRIVER", 13000)) return cudaErrorInsufficientDriver;
    return device_count() ? 0 : cudaErrorNoDevice;
}
RUNTIME(cudaDriverGetVersion)(int* version) { *version = number("FAKECUDA_DRIVER", 13000); return 0; }
RUNTIME(cudaGetDeviceCount)(int* count) { *count = 0; if (int error = available()) return error; *count = device_count(); return 0; }
RUNTIME(cudaGetDevice)(int* device) { if (int error = available()) return error; *device = current; return 0; }
RUNTIME(cudaSetDevice)(int device) {
    if (int error = available()) return error;
    if (device < 0 || device >= device_count()) return cudaErrorInvalidDevice;
    current = device;
    return 0;
}
RUNTIME(cudaGetLastError)() { return fault; }
RUNTIME(cudaDeviceGetAttribute)(int* value, int attribute, int device) {
    if (int error = available()) return error;
    (void)device;
    switch (attribute) {
        case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: *value = 1024; break;
        case cudaDevAttrMaxBlockDimZ: *value = 64; break;
        case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
        case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *value = 65535; break;
        case cudaDevAttrWarpSize: *value = 32; break;
        case cudaDevAttrMultiProcessorCount: *value = 4; break;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
        case cudaDevAttrComputeCapabilityMajor: *value = 8; break;
        case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *value = 48 << 10; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 99 << 10; break;
        case cudaDevAttrUnifiedAddressing: *value = 1; break;
        default: *value = 0;
    }
    return 0;
}
RUNTIME(cudaGetDeviceProperties)(cudaDeviceProp* properties, int device) {
    if (int error = available()) return error;
    memset(properties, 0, sizeof *properties);
    snprintf(properties->name, sizeof properties->name, "emulated device %d", device);
    properties->totalGlobalMem = capacity();
    properties->warpSize = 32;
    properties->maxThreadsPerBlock = 1024;
    properties->major = 8;
    properties->multiProcessorCount = 4;
    properties->sharedMemPerBlock = 48 << 10;
    return 0;
}
RUNTIME(cudaDeviceSynchronize)() {
    std::lock_guard<std::recursive_mutex> hold(lock);
    if (int error = waits_for_all(current, "a synchronization of the device")) return error;
    Clock all = default_stream(current)->clock;
    upload(*default_stream(current));
    for (Stream* stream : streams)
        if (stream->device == current) upload(*stream), merge(all, stream->clock);
    return synchronize(all);
}
RUNTIME(cudaDeviceCanAccessPeer)(int* can, int, int) { *can = 1; return 0; }
RUNTIME(cudaDeviceEnablePeerAccess)(int, unsigned) { return 0; }
RUNTIME(cudaMalloc)(void** p, size_t size) { return allocate(p, size, current); }
RUNTIME(cudaMallocManaged)(void** p, size_t size, unsigned) { return allocate(p, size, current); }
static int in_order(void* handle, const char* what) {  // which a graph would contain as a node
    std::lock_guard<std::recursive_mutex> hold(lock);
    Stream& stream = *stream_of(handle, current);
    return stream.capture ? refuse(*stream.capture, what) : 0;
}
RUNTIME(cudaMallocAsync)(void** p, size_t size, void* s) { if (int error = in_order(s, "an allocation in the stream's order")) return error; return allocate(p, size, current); }
RUNTIME(cudaHostAlloc)(void** p, size_t size, unsigned) { return allocate(p, size, -1); }
RUNTIME(cudaFree)(void* p) { return release(p); }
RUNTIME(cudaFreeAsync)(void* p, void* s) { if (int error = in_order(s, "a release of memory in the stream's order")) return error; return release(p); }
RUNTIME(cudaFreeHost)(void* p) { return release(p); }
RUNTIME(cudaMemGetInfo)(size_t* free, size_t* total) { *total = capacity(); *free = capacity() - used[current]; counts[MEMORY_QUERIES]++; return fault; }
RUNTIME(cudaMemcpy)(void* to, const void* from, size_t size, int kind) { counts[SYNCHRONIZATIONS]++; return copy_now(to, from, size, kind); }
RUNTIME(cudaMemcpyAsync)(void* to, const void* from, size_t size, int kind, void* stream) { return copy_later(to, from, size, kind, stream); }
RUNTIME(cudaMemcpyPeer)(void* to, int, const void* from, int, size_t size) { return copy_now(to, from, size, cudaMemcpyDeviceToDevice); }
RUNTIME(cudaMemcpyPeerAsync)(void* to, int, const void* from, int, size_t size, void* stream) { return copy_later(to, from, size, cudaMemcpyDeviceToDevice, stream); }
RUNTIME(cudaMemset)(void* to, int value, size_t size) { return fill_later(to, value, size, nullptr); }
RUNTIME(cudaMemsetAsync)(void* to, int value, size_t size, void* stream) { return fill_later(to, value, size, stream); }
RUNTIME(cudaPointerGetAttributes)(cudaPointerAttributes* attributes, const void* p) {
    std::lock_guard<std::recursive_mutex> hold(lock);
    memset(attributes, 0, sizeof *attributes);
    const Block* block = block_of(p);
    attributes->type = !block ? cudaMemoryTypeUnregistered : block->device < 0 ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    attributes->device = block && block->device >= 0 ? block->device : current;
    attributes->devicePointer = block ? (void*)p : nullptr;
    attributes->hostPointer = !block || block->device < 0 ? (void*)p : nullptr;
    return 0;
}
static int create(void** handle, bool blocking) {
    std::lock_guard<std::recursive_mutex> hold(lock);
    *handle = new_stream(current, blocking);
    return 0;
}
RUNTIME(cudaStreamCreate)(void** s) { return create(s, true); }
RUNTIME(cudaStreamCreateWithFlags)(void** s, unsigned flags) { return create(s, !(flags & cudaStreamNonBlocking)); }
RUNTIME(cudaStreamCreateWithPriority)(void** s, unsigned flags, int) { return create(s, !(flags & cudaStreamNonBlocking)); }
RUNTIME(cudaStreamDestroy)(void* s) {
    std::lock_guard<std::recursive_mutex> hold(lock);
    Stream& stream = *(Stream*)s;
    if (stream.capture) note(stream.name + " is destroyed while it captures"), stop_capture(stream);
    destroy(&stream);
    return 0;
}
RUNTIME(cudaStreamSynchronize)(void* s) {
    std::lock_guard<std::recursive_mutex> hold(lock);
    Stream& stream = *stream_of(s, current);
    if (int error = waits_for(stream, "a synchronization of the stream")) return error;
    counts[SYNCHRONIZATIONS]++;
    host_waits_for(stream);
    return fault;
}
RUNTIME(cudaStreamBeginCapture)(void* s, int mode) {
    std::lock_guard<std::recursive_mutex> hold(lock);
    return fault ? fault : begin_capture(s, mode);
}
RUNTIME(cudaStreamEndCapture)(void* s, void** graph) {
    std::lock_guard<std::recursive_mutex> hold(lock);
    return end_capture(s, graph);
}
RUNTIME(cudaStreamIsCapturing)(void* s, int* status) {
    std::lock_guard<std::recursive_mutex> hold(lock);
    const Stream& stream = *stream_of(s, current);
    *status = !stream.capture ? cudaStreamCaptureStatusNone : stream.capture->valid ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusInvalidated;
    for (Capture* capture : captures)
        if (&stream == default_stream(stream.device) && capture->stream->blocking && capture->stream->device == stream.device) return cudaErrorStreamCaptureImplicit;
    return 0;
}
RUNTIME(cudaGraphInstantiate)(void** executable, void* graph, unsigned long long) {
    std::lock_guard<std::recursive_mutex> hold(lock);
    return instantiate(executable, graph);
}
RUNTIME(cudaGraphUpload)(void* executable, void* s) {
    std::lock_guard<std::recursive_mutex> hold(lock);
    return executables.count((long)executable) ? waits_for(*stream_of(s, current), "an upload of a graph") : cudaErrorInvalidResourceHandle;
}
RUNTIME(cudaGraphLaunch)(void* executable, void* s) { return launch_graph(executable, s); }
RUNTIME(cudaGraphDestroy)(void* graph) {
    std::lock_guard<std::recursive_mutex> hold(lock);
    return recorded.erase((long)graph) ? 0 : cudaErrorInvalidValue;
}
RUNTIME(cudaGraphExecDestroy)(void* executable) {
    std::lock_guard<std::recursive_mutex> hold(lock);
    return executables.erase((long)executable) ? 0 : cudaErrorInvalidValue;
}
EXPORT long fake_graph_nodes(long executable) {
    std::lock_guard<std::recursive_mutex> hold(lock);
    auto found = executables.find(executable);
    return found == executables.end() ? -1 : found->second.graph->kernels;
}
// Events that a capturing stream records are of its capture; other work must not wait for them, nor the capture for other events.
RUNTIME(cudaStreamWaitEvent)(void* s, void* e, unsigned) {
    std::lock_guard<std::recursive_mutex> hold(lock);
    Stream& stream = *stream_of(s, current);
    const Event& event = *(Event*)e;
    if (stream.capture && stream.capture->number == event.capture) return 0;
    if (stream.capture) return refuse(*stream.capture, "a wait for work that is not captured", event.capture ? cudaErrorStreamCaptureMerge : cudaErrorStreamCaptureIsolation);
    if (int error = captured(event, "a fork to " + stream.name, cudaErrorStreamCaptureUnsupported)) return error;
    merge(stream.clock, event.clock);
    return 0;
}
RUNTIME(cudaStreamQuery)(void* s) {
    std::lock_guard<std::recursive_mutex> hold(lock);
    Stream& stream = *stream_of(s, current);
    if (fault) return fault;
    if (int error = waits_for(stream, "a query of the stream")) return error;
    if (!finished(stream.clock, stream.asked)) return cudaErrorNotReady;
    upload(stream);
    return 0;
}
RUNTIME(cudaEventCreate)(void** e) { *e = new Event; return 0; }
RUNTIME(cudaEventCreateWithFlags)(void** e, unsigned) { *e = new Event; return 0; }
RUNTIME(cudaEventDestroy)(void* e) { delete (Event*)e; return 0; }
RUNTIME(cudaEventRecord)(void* e, void* s) {
    std::lock_guard<std::recursive_mutex> hold(lock);
    counts[EVENTS]++;
    Stream& stream = *stream_of(s, current);
    Event& event = *(Event*)e;
    event.capture = stream.capture ? stream.capture->number : 0;
    if (stream.capture) return stream.capture->valid ? 0 : cudaErrorStreamCaptureInvalidated;
    if (int error = implied(stream, "a record of an event")) return error;
    begin(stream);
    event.clock = stream.clock, event.asked = 0;
    return fault;
}
RUNTIME(cudaEventSynchronize)(void* e) {
    std::lock_guard<std::recursive_mutex> hold(lock);
    const Event& event = *(Event*)e;
    if (int error = captured(event, "a synchronization of an event")) return error;
    if (int error = unsafe("a synchronization of an event")) return error;
    return synchronize(event.clock);
}
RUNTIME(cudaEventQuery)(void* e) {
    std::lock_guard<std::recursive_mutex> hold(lock);
    Event& event = *(Event*)e;
    if (int error = captured(event, "a query of an event")) return error;
    if (int error = unsafe("a query of an event")) return error;
    return fault ? fault : finished(event.clock, event.asked) ? 0 : cudaErrorNotReady;
}
RUNTIME(cudaEventElapsedTime)(float* milliseconds, void*, void*) { *milliseconds = 1; return 0; }

// ---- The driver
#define DRIVER(name) EXPORT int name
DRIVER(cuDriverGetVersion)(int* version) { *version = number("FAKECUDA_DRIVER", 13000); return 0; }
DRIVER(cuGetErrorName)(int error, const char** text) {
    *text = error == cudaErrorIllegalAddress ? "CUDA_ERROR_ILLEGAL_ADDRESS" : error == cudaErrorLaunchFailure ? "CUDA_ERROR_LAUNCH_FAILED"
          : error == cudaErrorInvalidValue ? "CUDA_ERROR_INVALID_VALUE"
          : error == cudaErrorStreamCaptureUnsupported ? "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
          : error == cudaErrorStreamCaptureInvalidated ? "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"
          : error == cudaErrorStreamCaptureImplicit ? "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT" : "CUDA_ERROR_UNKNOWN";
    return 0;
}
DRIVER(cuGetErrorString)(int error, const char** text) {
    *text = error == cudaErrorIllegalAddress ? "an illegal memory access was encountered"
          : error == cudaErrorLaunchFailure ? "unspecified launch failure" : "see cuGetErrorName";
    return 0;
}
DRIVER(cuCtxGetCurrent)(void** context) { *context = (void*)(size_t)(current + 1); return 0; }
DRIVER(cuCtxSetCurrent)(void* context) { current = (int)(size_t)context - 1; return 0; }
DRIVER(cuCtxGetDevice)(int* device) { *device = current; return 0; }
DRIVER(cuDevicePrimaryCtxRetain)(void** context, int device) { *context = (void*)(size_t)(device + 1); return 0; }
DRIVER(cuDevicePrimaryCtxRelease)(int) { return 0; }
DRIVER(cuDeviceGet)(int* device, int ordinal) { *device = ordinal; return 0; }

namespace {
struct Module {
    void* library;
    int device;
};
struct Parameter {  // of a kernel of the null device; described.py
    char kind;         // S: a number; P: a pointer; C: an array of CuPy
    int size = 0, axes = 0;
    char access = 'r', use = 'r';
};
struct Function {
    const FakeKernel* kernel;
    int device;
    std::vector<Parameter> described;
};
std::vector<Parameter> parameters(const std::string& text) {
    std::vector<Parameter> result;
    std::istringstream words(text);
    for (std::string word; words >> word;) {
        Parameter p{word[0]};
        sscanf(word.c_str(), "C%d:%d:%c:%c", &p.size, &p.axes, &p.access, &p.use);
        result.push_back(p);
    }
    return result;
}
}  // namespace

DRIVER(cuModuleLoadData)(void** module, const char* image) {  // the image is the path of a shared library
    if (null_device) {
        *module = new Module{strdup(image), current};
        return 0;
    }
    void* library = dlopen(image, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        fprintf(stderr, "fakecuda: %s\n", dlerror());
        return 209;  // CUDA_ERROR_NO_BINARY_FOR_GPU
    }
    *module = new Module{library, current};
    return 0;
}
DRIVER(cuModuleUnload)(void*) { return 0; }  // libraries stay: other devices may hold the same one
DRIVER(cuModuleGetFunction)(void** function, void* module, const char* name) {
    Module* from = (Module*)module;
    if (null_device) {
        const std::string text = (char*)from->library, line = std::string(name) + " ";
        size_t at = text.find("\n" + line);
        at = at == std::string::npos ? text.find(":" + line) : at;
        if (at == std::string::npos) return 500;
        at += 1 + line.size();
        *function = new Function{new FakeKernel{strdup(name), 0, nullptr, nullptr, nullptr}, from->device, parameters(text.substr(at, text.find('\n', at) - at))};
        return 0;
    }
    const FakeKernel* kernel = (const FakeKernel*)dlsym(from->library, (std::string("fake_kernel_") + name).c_str());
    if (!kernel) return 500;  // CUDA_ERROR_NOT_FOUND
    *function = new Function{kernel, from->device, {}};
    return 0;
}
DRIVER(cuModuleGetGlobal_v2)(void** address, size_t* size, void* module, const char* name) {
    if (null_device) {
        *address = calloc(1, 1 << 16);
        if (size) *size = 1 << 16;
        return 0;
    }
    *address = dlsym(((Module*)module)->library, name);
    if (size) *size = 0;
    return *address ? 0 : 500;
}
DRIVER(cuFuncGetAttribute)(int* value, int attribute, void*) { *value = attribute == 0 ? 1024 : 0; return 0; }
DRIVER(cuFuncSetAttribute)(void*, int, int) { return 0; }
DRIVER(cuOccupancyMaxActiveBlocksPerMultiprocessor)(int* blocks, void*, int, size_t) { *blocks = 2; return 0; }
DRIVER(cuOccupancyMaxPotentialBlockSize)(int* grid, int* block, void*, void*, size_t, int) { *grid = 8; *block = 256; return 0; }

// As on a device, the launch succeeds; a kernel that fails makes every later call fail.
static void execute(const FakeKernel& kernel, const FakeLaunch& launch, void** arguments, std::map<char*, Block>& arrays) {
    if (fake_order < 2) {
        run(kernel, launch, arguments, fake_order == 1);
        return;
    }
    std::vector<std::pair<Block, std::string>> old, first;
    for (auto& [start, block] : arrays) old.emplace_back(block, std::string(start, block.size));
    run(kernel, launch, arguments, true);
    if (fault) return;
    for (auto& [start, block] : arrays) first.emplace_back(block, std::string(start, block.size));
    for (auto& [block, bytes] : old) memcpy(block.start, bytes.data(), block.size);
    fake_watch.clear();
    fake_watches = 1;  // one of the two runs is enough
    run(kernel, launch, arguments, false);
    fake_watches = 0;
    if (fault) return;
    if (!fake_watch.wrong.empty()) {
        counts[RACES]++;
        note(std::string(kernel.name) + fake_watch.wrong);
    }
    // The first pass of a reduction by cub writes structures whose padding is undefined; the second pass reads none of it.
    if (strstr(kernel.name, "cupy_cub_") && strstr(kernel.name, "_pass1")) return;
    for (auto& [block, bytes] : first)
        if (memcmp(block.start, bytes.data(), block.size)) {
            counts[RACES]++;
            note(std::string(kernel.name) + ": its result depends on the order of its threads");
            break;
        }
}

namespace {
// The arrays among the arguments, each of which begins with an address.  Other words are none: the index in CuPy's CIndexer is not set.
std::map<char*, Block> arrays_of(const Function& from, void** arguments) {
    std::map<char*, Block> result;
    auto add = [&](const void* argument) {
        void* address;
        memcpy(&address, argument, sizeof address);
        const Block* block = address ? block_of(address) : nullptr;
        if (block) result[block->start] = *block;
    };
    for (size_t i = 0; i < from.described.size(); i++)
        if (from.described[i].kind != 'S') add(arguments[i]);
    for (int i = 0; i < from.kernel->parameters; i++)
        if (from.kernel->pointers[i]) add(arguments[i]);
    return result;
}

// The bytes that a kernel of the null device reads and writes: each array once, those that it reads and writes twice.
double bytes_of(const Function& from, void** arguments) {
    double bytes = 0, gathered = 0, largest = 0;
    std::set<std::pair<const void*, char>> seen;
    for (size_t i = 0; i < from.described.size(); i++) {
        const Parameter& p = from.described[i];
        if (p.kind == 'S') continue;
        const long* words = (const long*)arguments[i];  // of CuPy's CArray: address, number of elements, shape, strides in bytes
        const void* address = (const void*)words[0];
        const Block* block = address ? block_of(address) : nullptr;
        if (!block || !seen.emplace(p.kind == 'P' ? block->start : address, p.use).second) continue;
        double elements = p.kind == 'P' ? block->size : p.size;
        for (int axis = 0; axis < p.axes && p.kind == 'C'; axis++)
            if (words[2 + p.axes + axis] || !words[2 + axis]) elements *= words[2 + axis];  // a stride of 0 repeats one element
        if (p.access == 'g') gathered = elements;
        else bytes += elements, largest = std::max(largest, p.use == 'w' ? elements : 0.0);
    }
    return bytes + std::min(gathered, largest);
}

int launch(Stream& stream, const Function& from, const FakeLaunch& shape, void** arguments) {
    std::lock_guard<std::recursive_mutex> hold(lock);
    if (fault) return fault;
    const FakeKernel& kernel = *from.kernel;
    if (from.device != current) {
        counts[FOREIGN]++;
        note(std::string(kernel.name) + ": device " + std::to_string(current) + " was current, the kernel was loaded on device " + std::to_string(from.device));
    }
    for (int i = 0; i < kernel.parameters; i++) {
        void* first = nullptr;
        if (kernel.pointers[i]) memcpy(&first, arguments[i], sizeof first);
        if (first && !block_of(first) && !block_of((char*)first - 1)) {
            counts[HOST_POINTERS]++;
            note(std::string(kernel.name) + ": parameter " + std::to_string(i + 1) + " is no address of a device's memory");
        }
    }
    std::map<char*, Block> arrays = arrays_of(from, arguments);
    size_t size = 0;
    for (auto& [start, block] : arrays) {
        if (block.device >= 0 && block.device != current) note_foreign(kernel.name, block.device);
        size += block.size;
    }
    begin(stream);
    // Which of them it writes shows afterwards; large ones count as written while there is only the default stream.
    const bool compares = !streams.empty() || size <= (1 << 20);
    std::map<char*, std::string> content;
    if (compares)
        for (auto& [start, block] : arrays) content[start].assign(start, block.size);
    launched = &arrays;
    execute(kernel, shape, arguments, arrays);
    for (auto& [start, block] : arrays)
        note_use(block, kernel.name, stream, !compares || memcmp(start, content[start].data(), block.size) != 0);
    return 0;
}
}  // namespace

DRIVER(cuLaunchKernel)(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                       void* handle, void** arguments, void**) {
    std::lock_guard<std::recursive_mutex> hold(lock);
    if (fault) return fault;
    const Function& from = *(Function*)function;
    const FakeKernel& kernel = *from.kernel;
    const FakeLaunch shape = {{gx, gy, gz}, {bx, by, bz}, shared, false};
    const size_t threads = (size_t)bx * by * bz;
    if (!gx || !gy || !gz || !threads || threads > 1024 || bz > 64 || gy > 65535 || gz > 65535 || shared > (48u << 10)) {
        note(std::string(kernel.name) + ": a launch that a device refuses");
        return cudaErrorInvalidValue;
    }
    Stream& stream = *stream_of(handle, current);
    if (stream.capture) {
        Node node{{kernel.name, 1, bytes_of(from, arguments)}};
        for (auto& [start, block] : arrays_of(from, arguments)) node.addresses.push_back(start);
        std::vector<std::string> copies;
        for (int i = 0; i < kernel.parameters; i++) copies.emplace_back((char*)arguments[i], kernel.sizes[i]);
        node.run = [from, shape, copies](Stream& on) {
            std::vector<void*> addresses;
            for (const std::string& copy : copies) addresses.push_back((void*)copy.data());
            return launch(on, from, shape, addresses.data());
        };
        return record(stream, std::move(node));
    }
    if (int error = outside(stream, kernel.name)) return error;
    counts[LAUNCHES]++;
    if (!null_device) return launch(stream, from, shape, arguments);
    spend({kernel.name, 1, bytes_of(from, arguments)}, false);
    return 0;
}
