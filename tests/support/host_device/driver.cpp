// A CUDA driver and runtime on the host, for CuPy itself: devices whose streams are threads.
//
// What is asked of a stream is done by its thread, some time later and in order, so that a host that does not wait finds
// what was there before: new memory holds garbage. Memory of pages is copied when it is asked for, pinned memory when
// its turn comes. While a stream is captured, what CUDA refuses then is refused. Streams do not wait for the default one.
//
// HOST_CUDA is the version of CUDA, such as 13000. HOST_DEVICES is how many devices there are (default 1).

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace {

typedef std::function<void()> Work;

const int kVersion = HOST_CUDA, kGarbage = 0xA7;
const std::size_t kAlignment = 512;

thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;

int device_count() {
    const char* wanted = std::getenv("HOST_DEVICES");
    return wanted == nullptr ? 1 : std::atoi(wanted);
}

cudaError_t refuse(cudaError_t error) { return last_error = error; }

class Stream;

struct Graph {
    std::vector<Work> work;
    std::set<Stream*> streams;  // while it is captured
    bool is_invalid = false;
};

class Stream {
public:
    const int device;
    const unsigned int flags;
    Graph* graph = nullptr;  // while it is captured

    Stream(int device, unsigned int flags) : device(device), flags(flags), thread_([this] { run(); }) {}

    void push(Work work) {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (graph != nullptr) {
            graph->work.push_back(std::move(work));
            return;
        }
        waiting_.push_back(std::move(work));
        changed_.notify_all();
    }

    bool is_done() {
        const std::lock_guard<std::mutex> lock(mutex_);
        return waiting_.empty() && !is_busy_;
    }

    void wait() {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [this] { return waiting_.empty() && !is_busy_; });
    }

private:
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Work> waiting_;
    bool is_busy_ = false;
    std::thread thread_;

    void run() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            changed_.wait(lock, [this] { return !waiting_.empty(); });
            Work work = std::move(waiting_.front());
            waiting_.pop_front();
            is_busy_ = true;
            lock.unlock();
            work();
            work = nullptr;
            lock.lock();
            is_busy_ = false;
            changed_.notify_all();
        }
    }
};

// One recording of an event.
struct Point {
    std::mutex mutex;
    std::condition_variable changed;
    bool is_over = false;
    Graph* graph = nullptr;  // that is captured there
    std::chrono::steady_clock::time_point time;

    void pass() {
        const std::lock_guard<std::mutex> lock(mutex);
        is_over = true;
        time = std::chrono::steady_clock::now();
        changed.notify_all();
    }
    void wait() {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [this] { return is_over; });
    }
    bool is_passed() {
        const std::lock_guard<std::mutex> lock(mutex);
        return is_over;
    }
};

struct Event {
    const int device;
    std::shared_ptr<Point> last;
};

enum Kind { kPages, kDevice, kPinned };

struct Memory {
    std::size_t size;
    int device;
    Kind kind;
};

// Never destroyed: threads of streams outlive what a process ends with.
struct World {
    std::mutex mutex;
    std::set<Stream*> streams;
    std::map<int, Stream*> defaults;
    std::map<std::uintptr_t, Memory> memory;
};
World& world = *new World;
std::atomic<int> launches{0}, failure{0};

Memory memory_of(const void* pointer) {
    const std::lock_guard<std::mutex> lock(world.mutex);
    const std::uintptr_t address = (std::uintptr_t)pointer;
    auto found = world.memory.upper_bound(address);
    if (found == world.memory.begin()) return {0, -2, kPages};
    --found;
    return address < found->first + found->second.size ? found->second : Memory{0, -2, kPages};
}

Stream* stream_of(const void* handle) {
    if ((std::uintptr_t)handle > 2) return (Stream*)handle;
    // 0 and 1 are the default stream, and 2 is that of the thread.
    thread_local std::map<int, Stream*> own;
    const std::lock_guard<std::mutex> lock(world.mutex);
    Stream*& found = ((std::uintptr_t)handle == 2 ? own : world.defaults)[current_device];
    if (found == nullptr) world.streams.insert(found = new Stream(current_device, 0));
    return found;
}

// Waits for all streams of a device, or of all where it is negative.
void wait_for(int device) {
    std::vector<Stream*> chosen;
    {
        const std::lock_guard<std::mutex> lock(world.mutex);
        for (Stream* stream : world.streams) {
            if (device < 0 || stream->device == device) chosen.push_back(stream);
        }
    }
    for (Stream* stream : chosen) stream->wait();
}

cudaError_t allocate(void** pointer, std::size_t size, Kind kind) {
    *pointer = std::aligned_alloc(kAlignment, (size + kAlignment - 1) / kAlignment * kAlignment + kAlignment);
    if (*pointer == nullptr) return refuse(cudaErrorMemoryAllocation);
    std::memset(*pointer, kGarbage, size);
    const std::lock_guard<std::mutex> lock(world.mutex);
    world.memory[(std::uintptr_t)*pointer] = {size, current_device, kind};
    return cudaSuccess;
}

// Refuses what makes the host wait for a stream that is captured, which is worth nothing then.
bool is_refused(Stream* stream) {
    if (stream->graph == nullptr) return false;
    stream->graph->is_invalid = true;
    return true;
}

struct Module {
    void* library;
    int device;
};

typedef std::function<const char*(unsigned int, unsigned int)> Launch;

struct Kernel {
    std::string name;
    int device;
    Launch* (*prepare)(void* const*);
};

}  // namespace

extern "C" {

const char* cudaGetErrorName(cudaError_t error) {
    switch ((int)error) {
        case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
        case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
        case cudaErrorInvalidResourceHandle: return "cudaErrorInvalidResourceHandle";
        case cudaErrorNotReady: return "cudaErrorNotReady";
        case cudaErrorNotSupported: return "cudaErrorNotSupported";
        case cudaErrorStreamCaptureUnsupported: return "cudaErrorStreamCaptureUnsupported";
        case cudaErrorStreamCaptureInvalidated: return "cudaErrorStreamCaptureInvalidated";
        case cudaErrorStreamCaptureIsolation: return "cudaErrorStreamCaptureIsolation";
        case cudaErrorIllegalAddress: return "cudaErrorIllegalAddress";
        case cudaErrorCapturedEvent: return "cudaErrorCapturedEvent";
    }
    return "cudaErrorUnknown";
}
const char* cudaGetErrorString(cudaError_t) { return "of the driver on the host"; }
cudaError_t cudaGetLastError() {
    const cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaDriverGetVersion(int* version) { return *version = kVersion, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = kVersion, cudaSuccess; }

cudaError_t cudaGetDeviceCount(int* count) { return *count = device_count(), cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = current_device, cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= device_count()) return refuse(cudaErrorInvalidDevice);
    current_device = device;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    static const std::map<int, int> known = {
        {cudaDevAttrComputeCapabilityMajor, 9}, {cudaDevAttrMultiProcessorCount, 4}, {cudaDevAttrWarpSize, 32},
        {cudaDevAttrMaxThreadsPerBlock, 1024},  {cudaDevAttrMaxBlockDimX, 1024},     {cudaDevAttrMaxGridDimX, 0x7FFFFFFF},
        {cudaDevAttrMaxSharedMemoryPerBlock, 49152},
    };
    const auto found = known.find(attribute);
    *value = found == known.end() ? 0 : found->second;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
    std::memset(properties, 0, sizeof *properties);
    std::snprintf(properties->name, sizeof properties->name, "host %d", device);
    return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
    std::snprintf(text, size, "0000:0%d:00.0", device);
    return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 0, cudaSuccess; }
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t*, int) { return refuse(cudaErrorNotSupported); }
cudaError_t cudaDeviceSynchronize() {
    {
        const std::lock_guard<std::mutex> lock(world.mutex);
        for (Stream* stream : world.streams) {
            if (stream->device == current_device && is_refused(stream)) return refuse(cudaErrorStreamCaptureUnsupported);
        }
    }
    wait_for(current_device);
    return cudaSuccess;
}

cudaError_t cudaMalloc(void** pointer, std::size_t size) { return allocate(pointer, size, kDevice); }
cudaError_t cudaHostAlloc(void** pointer, std::size_t size, unsigned int) { return allocate(pointer, size, kPinned); }
cudaError_t cudaFree(void* pointer) {
    wait_for(-1);
    {
        const std::lock_guard<std::mutex> lock(world.mutex);
        world.memory.erase((std::uintptr_t)pointer);
    }
    std::free(pointer);
    return cudaSuccess;
}
cudaError_t cudaFreeHost(void* pointer) { return cudaFree(pointer); }
cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
    *free = *total = (std::size_t)8 << 30;
    return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
    const Memory found = memory_of(pointer);
    std::memset(attributes, 0, sizeof *attributes);
    const cudaMemoryType types[] = {cudaMemoryTypeUnregistered, cudaMemoryTypeDevice, cudaMemoryTypeHost};
    attributes->type = types[found.kind];
    attributes->device = found.device;
    attributes->devicePointer = found.kind == kPages ? nullptr : (void*)pointer;
    attributes->hostPointer = found.kind == kPinned ? (void*)pointer : nullptr;
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t size, cudaMemcpyKind, cudaStream_t handle) {
    if (failure != 0) return refuse((cudaError_t)(int)failure);
    Stream* stream = stream_of(handle);
    const Kind target = memory_of(to).kind, source = memory_of(from).kind;
    if ((target == kPages || source == kPages) && is_refused(stream)) return refuse(cudaErrorStreamCaptureUnsupported);
    if (source == kPages) {
        const auto staged = std::make_shared<std::string>((const char*)from, size);
        stream->push([=] { std::memcpy(to, staged->data(), size); });
    } else {
        stream->push([=] { std::memmove(to, from, size); });
    }
    if (target == kPages) stream->wait();
    return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t size, cudaMemcpyKind kind) {
    const cudaError_t error = cudaMemcpyAsync(to, from, size, kind, nullptr);
    if (error == cudaSuccess) stream_of(nullptr)->wait();
    return error;
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, std::size_t size, cudaStream_t stream) {
    return cudaMemcpyAsync(to, from, size, cudaMemcpyDefault, stream);
}
cudaError_t cudaMemcpyPeer(void* to, int, const void* from, int, std::size_t size) {
    return cudaMemcpy(to, from, size, cudaMemcpyDefault);
}
cudaError_t cudaMemsetAsync(void* to, int value, std::size_t size, cudaStream_t stream) {
    stream_of(stream)->push([=] { std::memset(to, value, size); });
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* handle, unsigned int flags) {
    Stream* made = new Stream(current_device, flags);
    const std::lock_guard<std::mutex> lock(world.mutex);
    world.streams.insert(made);
    *handle = (cudaStream_t)made;
    return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* handle) { return cudaStreamCreateWithFlags(handle, 0); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* handle, unsigned int flags, int) {
    return cudaStreamCreateWithFlags(handle, flags);
}
cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned int* flags) {
    return *flags = stream_of(stream)->flags, cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) { return *priority = 0, cudaSuccess; }
// What is under way goes on.
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    Stream* stream = stream_of(handle);
    if (is_refused(stream)) return refuse(cudaErrorStreamCaptureUnsupported);
    stream->wait();
    return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t handle) {
    Stream* stream = stream_of(handle);
    if (is_refused(stream)) return refuse(cudaErrorStreamCaptureUnsupported);
    return stream->is_done() ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned int) {
    Stream* stream = stream_of(handle);
    const auto point = ((Event*)event)->last;
    if (failure != 0) return refuse((cudaError_t)(int)failure);
    if (point == nullptr || (stream->graph != nullptr && stream->graph == point->graph)) return cudaSuccess;
    if (is_refused(stream)) return refuse(cudaErrorStreamCaptureIsolation);
    if (point->graph != nullptr) {
        if (point->graph->streams.empty()) return refuse(cudaErrorStreamCaptureUnsupported);
        // The stream joins the capture.
        (stream->graph = point->graph)->streams.insert(stream);
        return cudaSuccess;
    }
    stream->push([=] { point->wait(); });
    return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
    stream_of(stream)->push([=] { function(data); });
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned int) {
    return *handle = (cudaEvent_t) new Event{current_device, nullptr}, cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* handle) { return cudaEventCreateWithFlags(handle, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete (Event*)event, cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream_handle) {
    Event* event = (Event*)handle;
    Stream* stream = stream_of(stream_handle);
    if (event->device != stream->device) return refuse(cudaErrorInvalidResourceHandle);
    const auto point = std::make_shared<Point>();
    point->graph = stream->graph;
    event->last = point;
    stream->push([=] { point->pass(); });
    return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t handle) {
    if (failure != 0) return refuse((cudaError_t)(int)failure);
    const auto point = ((Event*)handle)->last;
    if (point == nullptr) return cudaSuccess;
    if (point->graph != nullptr) return refuse(cudaErrorCapturedEvent);
    return point->is_passed() ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
    const auto point = ((Event*)handle)->last;
    if (point == nullptr) return cudaSuccess;
    if (point->graph != nullptr) return refuse(cudaErrorCapturedEvent);
    point->wait();
    return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
    const auto first = ((Event*)begin)->last, last = ((Event*)end)->last;
    if (first == nullptr || last == nullptr) return refuse(cudaErrorInvalidResourceHandle);
    if (!first->is_passed() || !last->is_passed()) return refuse(cudaErrorNotReady);
    *milliseconds = std::chrono::duration<float, std::milli>(last->time - first->time).count();
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode) {
    if ((std::uintptr_t)handle <= 1) return refuse(cudaErrorStreamCaptureUnsupported);
    Stream* stream = stream_of(handle);
    (stream->graph = new Graph)->streams.insert(stream);
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
    Graph* captured = stream_of(handle)->graph;
    *graph = captured->is_invalid ? nullptr : (cudaGraph_t)captured;
    for (Stream* stream : captured->streams) stream->graph = nullptr;
    captured->streams.clear();
    return captured->is_invalid ? refuse(cudaErrorStreamCaptureInvalidated) : cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
    const Stream* stream = stream_of(handle);
    *status = stream->graph == nullptr ? cudaStreamCaptureStatusNone : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}
// Graphs are few, and are kept.
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long) {
    return *made = (cudaGraphExec_t)graph, cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
    for (const Work& work : ((Graph*)graph)->work) stream_of(stream)->push(work);
    return cudaSuccess;
}

CUresult cuGetErrorName(CUresult, const char** text) { return *text = "CUDA_ERROR_UNKNOWN", CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult, const char** text) { return *text = "of the driver on the host", CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext* context) {
    return *context = (CUcontext)(std::uintptr_t)(current_device + 1), CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext context) { return current_device = (int)(std::uintptr_t)context - 1, CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice* device) { return *device = current_device, CUDA_SUCCESS; }
CUresult cuStreamGetCtx(CUstream stream, CUcontext* context) {
    return *context = (CUcontext)(std::uintptr_t)(stream_of(stream)->device + 1), CUDA_SUCCESS;
}

// What nvrtc.cpp has compiled: the path of a library.
CUresult cuModuleLoadData(CUmodule* module, const void* image) {
    void* library = dlopen((const char*)image, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return CUDA_ERROR_INVALID_IMAGE;
    return *module = (CUmodule) new Module{library, current_device}, CUDA_SUCCESS;
}
CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction* function, CUmodule handle, const char* name) {
    const Module* module = (Module*)handle;
    void* found = dlsym(module->library, ("prepare_" + std::string(name)).c_str());
    if (found == nullptr) return CUDA_ERROR_NOT_FOUND;
    return *function = (CUfunction) new Kernel{name, module->device, (Launch * (*)(void* const*)) found}, CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute, CUfunction) { return *value = 1024, CUDA_SUCCESS; }
CUresult cuLaunchKernel(CUfunction function, unsigned int blocks, unsigned int y, unsigned int z, unsigned int threads,
                        unsigned int v, unsigned int w, unsigned int, CUstream handle, void** arguments, void**) {
    if (failure != 0) return (CUresult)(int)failure;
    const Kernel* kernel = (Kernel*)function;
    Stream* stream = stream_of(handle);
    // All that is here has one dimension.
    if (blocks == 0 || threads == 0 || threads > 1024 || y * z * v * w != 1) return CUDA_ERROR_INVALID_VALUE;
    if (kernel->device != stream->device || stream->device != current_device) return CUDA_ERROR_INVALID_HANDLE;
    const std::shared_ptr<Launch> launch(kernel->prepare(arguments));
    ++launches;
    stream->push([=] {
        const char* failure = (*launch)(blocks, threads);
        if (failure != nullptr) {
            std::fprintf(stderr, "%s: %s\n", kernel->name.c_str(), failure);
            std::abort();
        }
    });
    return CUDA_SUCCESS;
}

// By which cuda.bindings find the functions of a driver; many are those of the runtime.
CUresult cuGetProcAddress_v2(const char* name, void** function, int, cuuint64_t, CUdriverProcAddressQueryResult*) {
    static void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    *function = dlsym(library, name);
    if (*function == nullptr) *function = dlsym(library, ("cuda" + std::string(name + 2)).c_str());
    return CUDA_SUCCESS;
}
CUresult cuInit(unsigned int) { return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice* device, int number) { return *device = number, CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int* count) { return (CUresult)cudaGetDeviceCount(count); }
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
    return *context = (CUcontext)(std::uintptr_t)(device + 1), CUDA_SUCCESS;
}
int cudaDevicePrimaryCtxRelease(CUdevice) { return 0; }
CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) { return *least = *greatest = 0, CUDA_SUCCESS; }
CUresult cuEventCreate(CUevent* event, unsigned int flags) { return (CUresult)cudaEventCreateWithFlags(event, flags); }

// For tests: how many kernels were launched, and a status that all calls come to from now on, as after a fault.
int host_launches() { return launches; }
void host_fail(int status) { failure = status; }

}  // extern "C"
