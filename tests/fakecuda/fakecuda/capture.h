// Stream capture and graphs.  While a stream captures, its work is recorded as nodes, with copies of their arguments, and is not
// executed.  A launch of the graph executes the nodes on the launch's stream, as if the host had issued them there again: bounds,
// orders of threads and the clocks of streams hold at each replay.
//
// What a driver forbids while a stream captures fails, invalidates the capture and is reported.  A fork to another stream and copies
// from and to pinned memory, which a driver records, are refused too.
#pragma once
#include <functional>
#include <memory>
#include <thread>

struct Work {  // of a kernel, a copy, a memset or a library's function, for the null device
    std::string name;
    int kernels;  // that a device runs for it: a function of cub can be two
    double bytes = 0, flops = 0;
};
struct Node : Work {
    std::vector<const void*> addresses;  // of the arrays that it uses
    std::function<int(Stream&)> run;
};
struct Graph;
std::set<Graph*> graphs;  // all that exist, as graphs, executable graphs or captures
struct Graph {
    int device;
    std::vector<Node> nodes;
    std::map<const void*, std::string> users;  // by the start of an array: a node that uses it
    long kernels = 0;
    std::string freed;  // what was freed while the graph existed, and is used by it
    explicit Graph(int device) : device(device) { graphs.insert(this); }
    ~Graph() {
        std::lock_guard<std::recursive_mutex> hold(lock);
        graphs.erase(this);
    }
};
struct Capture {
    Stream* stream;
    int mode;
    long number;
    std::thread::id thread = std::this_thread::get_id();
    std::shared_ptr<Graph> graph;
    bool valid = true;
};
struct Executable {
    std::shared_ptr<const Graph> graph;
    Stream* stream = nullptr;  // of the last launch
    long time = 0;             // of its end
};
bool logs = false;
std::string work;  // that was done, one line each

void spend(const Work& done, bool in_graph) {
    counts[KERNEL_BYTES] += (long)done.bytes;
    if (logs) work += std::to_string(in_graph) + " " + std::to_string(done.kernels) + " " + std::to_string((long)done.bytes) + " " + std::to_string((long)done.flops) + " " + done.name + "\n";
}
std::map<long, std::shared_ptr<Graph>> recorded;  // by handle; a handle is never used again
std::map<long, Executable> executables;
std::vector<Capture*> captures;  // that are open
thread_local bool replaying = false;

// Work that a capturing stream cannot take.
int refuse(Capture& capture, const std::string& what, int error = cudaErrorStreamCaptureUnsupported) {
    note(what + " while " + capture.stream->name + " captures");
    capture.valid = false;
    return error;
}
int record(Stream& stream, Node node) {
    Capture& capture = *stream.capture;
    if (!capture.valid) return cudaErrorStreamCaptureInvalidated;
    Graph& graph = *capture.graph;
    for (const void* address : node.addresses)
        if (const Block* block = block_of(address)) graph.users.emplace(block->start, node.name);
    graph.kernels += node.kernels;
    graph.nodes.push_back(std::move(node));
    return 0;
}
// The legacy default stream, and what waits for it, would include the work of a blocking stream that captures.
int implied(const Stream& stream, const std::string& what) {
    if (&stream == default_stream(stream.device))
        for (Capture* capture : captures)
            if (capture->stream->blocking && capture->stream->device == stream.device) return refuse(*capture, what, cudaErrorStreamCaptureImplicit);
    return 0;
}
// Work of a stream that does not capture: of the thread that captures, it is probably meant for the graph.
int outside(const Stream& stream, const std::string& what) {
    for (Capture* capture : captures)
        if (capture->thread == std::this_thread::get_id())
            note(what + " on " + stream.name + " while " + capture->stream->name + " captures is not a part of the graph");
    return implied(stream, what);
}
// Calls that wait for a stream, or ask whether it has finished.
int waits_for(const Stream& stream, const std::string& what) {
    return stream.capture ? refuse(*stream.capture, what) : implied(stream, what);
}
// Calls that wait for all streams of a device, and those that a thread makes which must not wait: copies that are finished on return.
int waits_for_all(int device, const std::string& what, bool of_this_thread = false) {
    for (Capture* capture : captures)
        if (capture->stream->device == device && (!of_this_thread || capture->thread == std::this_thread::get_id())) return refuse(*capture, what);
    return implied(*default_stream(device), what);
}
// Calls that need an event which a capturing stream has recorded to be finished.
int captured(const Event& event, const std::string& what, int error = cudaErrorCapturedEvent) {
    if (!event.capture) return 0;
    for (Capture* capture : captures)
        if (capture->number == event.capture) return refuse(*capture, what, error);
    note(what + " that was recorded while a stream captured");
    return error;
}
// Calls that may wait, such as cudaMalloc: a capture in relaxed mode, CuPy's default, permits them.
int unsafe(const char* what) {
    for (Capture* capture : captures)
        if (capture->mode == cudaStreamCaptureModeGlobal || (capture->mode == cudaStreamCaptureModeThreadLocal && capture->thread == std::this_thread::get_id()))
            return refuse(*capture, what);
    return 0;
}
void freed(const Block& block) {
    for (Graph* graph : graphs) {
        auto user = graph->users.find(block.start);
        if (user != graph->users.end() && graph->freed.empty())
            graph->freed = "an array of " + std::to_string(block.size) + " bytes that " + user->second + " uses was freed";
    }
}

int begin_capture(void* handle, int mode) {
    static long number = 0;
    Stream& stream = *stream_of(handle, current);
    if (&stream == default_stream(current)) {
        note("a capture of the default stream");
        return cudaErrorStreamCaptureUnsupported;
    }
    if (stream.capture) {
        note("a second capture of " + stream.name);
        return cudaErrorIllegalState;
    }
    stream.capture = new Capture{&stream, mode, ++number};
    stream.capture->graph = std::make_shared<Graph>(stream.device);
    captures.push_back(stream.capture);
    return 0;
}
std::shared_ptr<Graph> stop_capture(Stream& stream) {  // null if it was invalidated
    std::unique_ptr<Capture> capture(stream.capture);
    stream.capture = nullptr;
    captures.erase(std::find(captures.begin(), captures.end(), capture.get()));
    return capture->valid ? capture->graph : nullptr;
}
int end_capture(void* handle, void** graph) {
    static long last = 0;
    *graph = nullptr;
    Stream& stream = *stream_of(handle, current);
    if (!stream.capture) {
        note("the end of a capture that was not begun on " + stream.name);
        return cudaErrorIllegalState;
    }
    if (stream.capture->mode != cudaStreamCaptureModeRelaxed && stream.capture->thread != std::this_thread::get_id())
        return refuse(*stream.capture, "the end of a capture by another thread", cudaErrorStreamCaptureWrongThread);
    std::shared_ptr<Graph> result = stop_capture(stream);
    if (!result) return cudaErrorStreamCaptureInvalidated;
    recorded[++last] = result;
    *graph = (void*)last;
    return 0;
}
int instantiate(void** executable, void* graph) {
    static long last = 0;
    auto found = recorded.find((long)graph);
    if (found == recorded.end()) return cudaErrorInvalidValue;
    executables[++last] = {found->second};
    *executable = (void*)last;
    return 0;
}

// What is wrong with a launch of a graph, before its nodes run.
int check_launch(long handle, Stream& stream) {
    auto found = executables.find(handle);
    if (found == executables.end()) {
        note("a launch of a graph that was destroyed, or was never made");
        return cudaErrorInvalidResourceHandle;
    }
    if (stream.capture) return refuse(*stream.capture, "a launch of a graph");
    if (int error = outside(stream, "a launch of a graph")) return error;
    const Executable& executable = found->second;
    if (stream.device != executable.graph->device) note_foreign("a launch of a graph of another device", executable.graph->device);
    if (!executable.graph->freed.empty()) {
        note("a launch of a graph: " + executable.graph->freed);
        return fault = cudaErrorIllegalAddress;
    }
    begin(stream);
    if (executable.stream && executable.stream != &stream && !contains(stream.clock, executable.stream, executable.time)) {
        counts[UNORDERED]++;
        note("a graph is launched on " + stream.name + " that has not finished on " + executable.stream->name);
        merge(stream.clock, executable.stream->clock);  // the driver orders two launches of one graph
    }
    counts[GRAPHS]++;
    return 0;
}
int launch_graph(void* handle, void* on) {
    std::shared_ptr<const Graph> graph;
    Stream* stream;
    {
        std::lock_guard<std::recursive_mutex> hold(lock);
        if (fault) return fault;
        stream = stream_of(on, current);
        if (int error = check_launch((long)handle, *stream)) return error;
        graph = executables[(long)handle].graph;
        counts[GRAPH_NODES] += graph->kernels;
        for (size_t i = 0; i < graph->nodes.size() && null_device; i++) spend(graph->nodes[i], true);
    }
    // The lock is not held: a node may run Python, whose other threads may wait for the lock.
    int error = 0;
    const int before = current;
    current = graph->device, replaying = true;
    for (size_t i = 0; i < graph->nodes.size() && !error && !null_device; i++)
        if ((error = graph->nodes[i].run(*stream)) && !fault) note("a node of a graph failed: " + graph->nodes[i].name);
    current = before, replaying = false;
    std::lock_guard<std::recursive_mutex> hold(lock);
    auto found = executables.find((long)handle);
    if (found != executables.end()) found->second.stream = stream, found->second.time = stream->time;
    return error;
}
