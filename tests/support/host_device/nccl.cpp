// NCCL for the driver on the host, between communicators of one process, one for each device: all-reduces that are the
// MAX of int32 or the sum of float32.
//
// As NCCL does, the first collective connects the ranks while the host waits, and others are work of their streams.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace {

const int kInt32 = 2, kMax = 2, kFloat32 = 7, kSum = 0;
const int kInvalidArgument = 4, kInvalidUsage = 5, kRemoteError = 6, kInProgress = 7;

struct Round {
    int arrived = 0;
    std::vector<int> values;
};

struct World {
    std::string name;
    std::mutex mutex;
    std::condition_variable changed;
    int size = 0, joined = 0, connected = 0, failure = 0;
    std::map<long, Round> rounds;
};

struct Communicator {
    std::shared_ptr<World> world;
    int rank, device;
    bool is_connected = false, is_ended = false;
    long rounds = 0;  // that its stream has begun

    // Waits for something of all ranks; tells whether it came.
    template <typename Condition>
    bool wait(std::unique_lock<std::mutex>& lock, Condition is_there) {
        world->changed.notify_all();
        world->changed.wait(lock, [&] { return is_ended || is_there(); });
        return !is_ended;
    }
};

int larger(int a, int b) { return std::max(a, b); }
int sum(int a, int b) {
    float values[2];
    std::memcpy(&values[0], &a, sizeof a);
    std::memcpy(&values[1], &b, sizeof b);
    values[0] += values[1];
    std::memcpy(&a, &values[0], sizeof a);
    return a;
}

struct Reduction {
    Communicator* communicator;
    int (*combine)(int, int);
    const int* send;
    int* receive;
    std::size_t count;
};

// Of a graph each replay is a round of its own.
void reduce(void* given) {
    const Reduction& mine = *(Reduction*)given;
    World& world = *mine.communicator->world;
    std::unique_lock<std::mutex> lock(world.mutex);
    Round& round = world.rounds[mine.communicator->rounds++];
    if (round.arrived++ == 0) {
        round.values.assign(mine.send, mine.send + mine.count);
    } else {
        std::transform(mine.send, mine.send + mine.count, round.values.begin(), round.values.begin(), mine.combine);
    }
    if (mine.communicator->wait(lock, [&] { return round.arrived == world.size; })) {
        std::memcpy(mine.receive, round.values.data(), sizeof(int) * mine.count);
    }
}

std::mutex naming;
std::map<std::string, std::shared_ptr<World>>& worlds = *new std::map<std::string, std::shared_ptr<World>>;

}  // namespace

extern "C" {

struct Name {
    char text[128];
};

const char* ncclGetErrorString(int) { return "of NCCL on the host"; }
int ncclGetVersion(int* version) { return *version = 22703, 0; }
int ncclGetUniqueId(Name* name) {
    static int count = 0;
    const std::lock_guard<std::mutex> lock(naming);
    std::snprintf(name->text, sizeof name->text, "%d", ++count);
    return 0;
}
int ncclCommInitRankConfig(Communicator** made, int size, Name name, int rank, void*) {
    std::shared_ptr<World> world;
    {
        const std::lock_guard<std::mutex> lock(naming);
        std::shared_ptr<World>& found = worlds[name.text];
        if (found == nullptr) found = std::make_shared<World>();
        world = found;
        world->name = name.text;
    }
    int device;
    cudaGetDevice(&device);
    *made = new Communicator{world, rank, device};
    std::unique_lock<std::mutex> lock(world->mutex);
    world->size = size;
    ++world->joined;
    return (*made)->wait(lock, [&] { return world->joined == size; }) ? 0 : kRemoteError;
}
int ncclCommInitRank(Communicator** made, int size, Name name, int rank) {
    return ncclCommInitRankConfig(made, size, name, rank, nullptr);
}
int ncclCommInitRankScalable(Communicator** made, int size, int rank, int, const Name* names, void*) {
    return ncclCommInitRank(made, size, *names, rank);
}
int ncclCommShrink(const Communicator* one, const int* excluded, int count, Communicator** made, void*, int) {
    std::string text = one->world->name;
    for (int k = 0; k < count; ++k) text += "-" + std::to_string(excluded[k]);
    Name name = {};
    text.copy(name.text, sizeof name.text - 1);
    const long before = std::count_if(excluded, excluded + count, [&](int rank) { return rank < one->rank; });
    return ncclCommInitRank(made, one->world->size - count, name, one->rank - before);
}
// Of all ranks, each with the key of its rank.
int ncclCommSplit(const Communicator* one, int, int rank, Communicator** made, void*) {
    Name name = {};
    (one->world->name + "+").copy(name.text, sizeof name.text - 1);
    return ncclCommInitRank(made, one->world->size, name, rank);
}
int ncclCommCount(const Communicator* one, int* count) { return *count = one->world->size, 0; }
int ncclCommCuDevice(const Communicator* one, int* device) { return *device = one->device, 0; }
int ncclCommUserRank(const Communicator* one, int* rank) { return *rank = one->rank, 0; }
int ncclCommGetAsyncError(const Communicator* one, int* error) { return *error = one->world->failure, 0; }
int ncclCommDestroy(Communicator*) { return 0; }
int ncclCommAbort(Communicator* one) {
    const std::lock_guard<std::mutex> lock(one->world->mutex);
    one->is_ended = true;
    one->world->changed.notify_all();
    return 0;
}
int ncclCommRevoke(Communicator* one, int) { return ncclCommAbort(one); }
int ncclAllReduce(const void* send, void* receive, std::size_t count, int type, int operation, Communicator* one,
                  cudaStream_t stream) {
    // Another thread has aborted it since, for which CuPy passes none.
    const bool is_max = type == kInt32 && operation == kMax, is_sum = type == kFloat32 && operation == kSum;
    if (one == nullptr || !(is_max || is_sum)) return kInvalidArgument;
    int device;
    cudaGetDevice(&device);
    if (device != one->device || one->is_ended) return kInvalidUsage;
    World& world = *one->world;
    if (world.failure != 0 && world.failure != kInProgress) return world.failure;
    if (!one->is_connected) {
        std::unique_lock<std::mutex> lock(world.mutex);
        ++world.connected;
        if (!one->wait(lock, [&] { return world.connected == world.size; })) return kRemoteError;
        one->is_connected = true;
    }
    const auto combine = is_max ? larger : sum;
    cudaLaunchHostFunc(stream, reduce, new Reduction{one, combine, (const int*)send, (int*)receive, count});
    return 0;
}

// For tests: what NCCL finds on its own from now on.
void host_nccl_fail(Communicator* one, int status) { one->world->failure = status; }

}  // extern "C"
