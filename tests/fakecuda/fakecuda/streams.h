// What of the work on streams is ordered, and copies that have not been made yet.
//
// All work is executed at once, and in the order of the calls, which a device may do too.  It need not: work of two streams is
// ordered only by events, by synchronizations, and by the default stream, which waits for blocking streams and lets them wait.
// Each stream, event and the host has a clock: how much of each stream's work is finished for it.  Work that uses an array whose
// last writer, or reader, is not in its stream's clock is reported, whatever order the device would choose.  Streams of two
// devices are not compared: an array of another device is reported as that (FOREIGN).
//
// What the host can see of the order is delayed: the target of a copy to pinned memory contains 0xCD until the host has waited
// for the copy, and a copy from pinned memory reads its source when the stream's next work begins (with `copies("late")`).
#pragma once
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <vector>

struct Stream;
using Clock = std::map<const Stream*, long>;

struct Delivery {  // a copy to pinned memory for which the host has not waited
    char* to;
    std::string bytes;
    long time;
};
struct Upload {  // a copy from pinned memory whose source was not read yet
    char *to, *from;
    size_t size;
};
struct Stream {
    int device;
    bool blocking;
    std::string name;
    Clock clock;
    long time = 0;
    bool destroyed = false;
    int asked = 0;
    std::vector<Delivery> deliveries;
    std::vector<Upload> uploads;
    struct Capture* capture = nullptr;  // while its work is recorded (capture.h)
};
struct Event {
    Clock clock;
    int asked = 0;
    long capture = 0;  // the number of the capture in which it was recorded
};
struct Use {  // of an allocation
    const Stream* writer = nullptr;
    std::string what;
    long written = 0;
    Clock read;
};

static Clock host_clock;
static std::set<Stream*> streams;  // all but the default ones, of all devices; destroyed ones too, until their work is finished
static std::map<const void*, Use> uses;  // by the start of the allocation

static void merge(Clock& into, const Clock& from) {
    for (auto& [stream, time] : from) into[stream] = std::max(into[stream], time);
}
static bool contains(const Clock& clock, const Stream* stream, long time) {
    auto found = clock.find(stream);
    return found != clock.end() && found->second >= time;
}

static Stream* default_stream(int device) {
    static std::map<int, Stream> all;
    auto [found, made] = all.try_emplace(device);
    if (made) found->second.device = device, found->second.blocking = true, found->second.name = "the default stream";
    return &found->second;
}
static Stream* stream_of(void* handle, int device) {  // 0, 1 and 2 are the default stream, of the device or of the thread
    return (size_t)handle <= 2 ? default_stream(device) : (Stream*)handle;
}
static Stream* new_stream(int device, bool blocking) {
    static int number = 0;
    Stream* stream = new Stream{device, blocking, "stream " + std::to_string(++number), {}, 0, false, 0, {}, {}};
    streams.insert(stream);
    return stream;
}

static void upload(Stream& stream) {
    for (const Upload& u : stream.uploads) memmove(u.to, u.from, u.size);
    stream.uploads.clear();
}

// Work of a stream begins: it waits for what the host, and the default stream or all blocking ones, order before it.
static void begin(Stream& stream) {
    upload(stream);
    merge(stream.clock, host_clock);
    Stream* first = default_stream(stream.device);
    if (&stream == first)
        for (Stream* other : streams) {
            if (other->device == stream.device && other->blocking) merge(stream.clock, other->clock), upload(*other);
        }
    else if (stream.blocking) merge(stream.clock, first->clock), upload(*first);
    stream.clock[&stream] = ++stream.time;
}

// All work of a stream is finished, and no new work can come from it.  Its clocks may be named elsewhere: it is not deleted.
static void forget(Stream* stream) {
    streams.erase(stream);
    for (auto& [start, u] : uses) {
        if (u.writer == stream) u.writer = nullptr;
        u.read.erase(stream);
    }
}

// The host has waited for work: copies to pinned memory are there.
static void host_waits(const Clock& clock) {
    merge(host_clock, clock);
    auto deliver = [](Stream& stream) {
        auto& all = stream.deliveries;
        for (size_t i = 0; i < all.size();)
            if (contains(host_clock, &stream, all[i].time)) {
                memcpy(all[i].to, all[i].bytes.data(), all[i].bytes.size());
                all.erase(all.begin() + i);
            } else i++;
    };
    for (Stream* stream : streams) deliver(*stream);
    for (int device = 0; device < 16; device++) deliver(*default_stream(device));
    const std::set<Stream*> all = streams;
    for (Stream* stream : all)
        if (stream->destroyed && contains(host_clock, stream, stream->time)) forget(stream);
}
static void host_waits_for(Stream& stream) {
    upload(stream);
    if (&stream == default_stream(stream.device)) begin(stream);  // and so for blocking streams
    host_waits(stream.clock);
}

// An array is used by the work that `begin` began.  Returns what is wrong, or "".
static std::string use(const void* start, const std::string& what, Stream& stream, bool writes) {
    Use& u = uses[start];
    std::string wrong;
    if (u.writer && u.writer != &stream && u.writer->device == stream.device && !contains(stream.clock, u.writer, u.written))
        wrong = what + " on " + stream.name + (writes ? " writes" : " reads") + " an array that " + u.what + " has not finished writing on " + u.writer->name;
    if (writes && wrong.empty())
        for (auto& [reader, time] : u.read)
            if (reader != &stream && reader->device == stream.device && !contains(stream.clock, reader, time))
                wrong = what + " on " + stream.name + " writes an array that is being read on " + reader->name;
    if (writes) u = Use{&stream, what, stream.time, {}};
    else u.read[&stream] = stream.time;
    return wrong;
}

// Whether work is finished, for a host that asks and does not wait: not before it was asked often, unless it knows.
static bool finished(const Clock& clock, int& asked) {
    bool known = true;
    for (auto& [stream, time] : clock) known &= contains(host_clock, stream, time);
    if (!known && ++asked < 1000) return false;
    asked = 0;
    host_waits(clock);
    return true;
}

// A device goes on with the work of a stream that is destroyed.
static void destroy(Stream* stream) {
    stream->destroyed = true;
    if (!stream->time || contains(host_clock, stream, stream->time)) forget(stream);
}
