// What g++ calls at each access to memory (-fsanitize=thread; the sanitizer itself is not linked), for one kernel at a time: a
// number of an array that two threads read and then write, by plain accesses and without a barrier between them.
#pragma once
#include <cstdint>
#include <unordered_map>

extern "C" {
EXPORT int fake_watches = 0;
EXPORT unsigned fake_thread = 0, fake_threads = 1, fake_epoch = 0;  // of device.h: the number of the thread; threads of a block; barriers
}

struct Watch {
    struct Seen {
        unsigned reader = 0, writer = 0, epoch = 0;  // threads from 1
    };
    std::unordered_map<uintptr_t, Seen> seen;
    std::string wrong;

    void clear() { seen.clear(), wrong.clear(), fake_epoch = 0; }

    static bool in_array(void* address) {
        auto next = launched->upper_bound((char*)address);
        if (next == launched->begin()) return false;
        const Block& block = std::prev(next)->second;
        return (char*)address < block.start + block.size;
    }
    void read(void* address) {
        if (in_array(address)) seen[(uintptr_t)address].reader = fake_thread + 1;
    }
    void write(void* address) {
        if (!in_array(address)) return;
        Seen& at = seen[(uintptr_t)address];
        const unsigned self = fake_thread + 1;
        if (at.reader != self) return;
        const bool ordered = (at.writer - 1) / fake_threads == fake_thread / fake_threads && at.epoch != fake_epoch;
        if (at.writer && at.writer != self && !ordered && wrong.empty())
            wrong = ": threads " + std::to_string(at.writer - 1) + " and " + std::to_string(self - 1) + " read and write the same number without an atomic";
        at.writer = self, at.epoch = fake_epoch;
    }
};
static Watch fake_watch;

#define WATCH(size) \
    EXPORT void __tsan_read##size(void* p) { if (fake_watches) fake_watch.read(p); } \
    EXPORT void __tsan_write##size(void* p) { if (fake_watches) fake_watch.write(p); }
WATCH(1) WATCH(2) WATCH(4) WATCH(8) WATCH(16)
#undef WATCH
#define WATCH(size) \
    EXPORT void __tsan_unaligned_read##size(void* p) { if (fake_watches) fake_watch.read(p); } \
    EXPORT void __tsan_unaligned_write##size(void* p) { if (fake_watches) fake_watch.write(p); }
WATCH(2) WATCH(4) WATCH(8) WATCH(16)
EXPORT void __tsan_read_range(void* p, size_t) { if (fake_watches) fake_watch.read(p); }
EXPORT void __tsan_write_range(void* p, size_t) { if (fake_watches) fake_watch.write(p); }
EXPORT void __tsan_vptr_read(void*) {}
EXPORT void __tsan_vptr_update(void*, void*) {}
EXPORT void __tsan_init() {}
