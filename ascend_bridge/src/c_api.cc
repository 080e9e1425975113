// What Python calls directly: opening, devices, tensors that stay on a device. Every function that returns int32_t
// gives 0 or a status code of XLA, whose text `deepinfer_ascend_error` returns on the same thread. Texts stay valid
// until the next call of the same function on the same thread.
#include <cstring>

#include "json.h"
#include "runtime.h"

#define BRIDGE_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using namespace deepinfer::ascend;

thread_local std::string last_error;

template <class Work>
int32_t Guarded(Work work) {
  try {
    work();
    return 0;
  } catch (const BridgeError& error) {
    last_error = error.what();
    return static_cast<int32_t>(error.code());
  }
}

// Runs work on a device with its mutex held and its context set.
template <class Work>
int32_t OnDevice(int32_t ordinal, Work work) {
  return Guarded([&] {
    Runtime& runtime = Runtime::Get();
    Device& device = runtime.device(ordinal);
    std::lock_guard<std::mutex> lock(device.mutex);
    device.Enter();
    work(device, runtime.handles(ordinal));
  });
}

int32_t OrdinalOf(const uint32_t* words) { return static_cast<int32_t>(words[1]); }

}  // namespace

BRIDGE_EXPORT const char* deepinfer_ascend_error() { return last_error.c_str(); }

// Empty texts mean "not given"; determinism -1 leaves CANN's level alone.
BRIDGE_EXPORT int32_t deepinfer_ascend_open(const char* simulator, const char* library_dir, const char* home_dir,
                                            const char* accept_version, uint64_t arena_bytes, int32_t sync_timeout_ms,
                                            int32_t is_blocking, int64_t determinism) {
  return Guarded([&] {
    Runtime::Open({{simulator, library_dir, home_dir, accept_version},
                   {static_cast<size_t>(arena_bytes), sync_timeout_ms, is_blocking != 0},
                   determinism});
  });
}

BRIDGE_EXPORT void deepinfer_ascend_close() { Runtime::Close(); }

// {"version", "soc", "devices", "is_simulator", "libraries"}
BRIDGE_EXPORT int32_t deepinfer_ascend_describe(const char** json) {
  thread_local std::string text;
  return Guarded([&] {
    Runtime& runtime = Runtime::Get();
    std::vector<std::string> paths;
    for (const std::string& path : runtime.libraries().paths()) paths.push_back(deepinfer::Quoted(path));
    text = "{\"version\": " + deepinfer::Quoted(runtime.version()) +
           ", \"soc\": " + deepinfer::Quoted(runtime.soc_name()) +
           ", \"devices\": " + std::to_string(runtime.num_devices()) +
           ", \"is_simulator\": " + (runtime.libraries().is_simulator() ? "true" : "false") +
           ", \"libraries\": " + deepinfer::JsonList(paths) + "}";
    *json = text.c_str();
  });
}

// [{"name", "first_version", "last_version", "signature"}, ...]; needs no open bridge.
BRIDGE_EXPORT const char* deepinfer_ascend_operators() {
  thread_local std::string text;
  std::vector<std::string> entries;
  for (const OperatorInfo& info : AllOperators()) {
    entries.push_back("{\"name\": " + deepinfer::Quoted(info.name) +
                      ", \"first_version\": " + deepinfer::Quoted(info.first_version) +
                      ", \"last_version\": " + deepinfer::Quoted(info.last_version) +
                      ", \"signature\": " + deepinfer::Quoted(info.signature) + "}");
  }
  text = deepinfer::JsonList(entries);
  return text.c_str();
}

// Why an operator cannot be used, or "" when it can; `library` is where it was found.
BRIDGE_EXPORT int32_t deepinfer_ascend_why_not(const char* name, const char** reason, const char** library) {
  thread_local std::string text, path;
  return Guarded([&] {
    text = Runtime::Get().WhyNot(name);
    path = Runtime::Get().libraries().Find(name).library;
    *reason = text.c_str();
    *library = path.c_str();
  });
}

// Makes `num_groups` groups of `group_size` devices each, given one behind the other; `family` gets their number.
BRIDGE_EXPORT int32_t deepinfer_ascend_make_groups(const int32_t* ordinals, int32_t num_groups, int32_t group_size,
                                                   int64_t* family) {
  return Guarded([&] {
    Runtime& runtime = Runtime::Get();
    std::vector<std::vector<int32_t>> groups;
    for (int32_t i = 0; i < num_groups; ++i) {
      groups.emplace_back(ordinals + i * group_size, ordinals + (i + 1) * group_size);
      for (int32_t ordinal : groups.back()) runtime.device(ordinal);  // throws for one that does not exist
    }
    *family = runtime.groups().Add(groups);
  });
}

// The status code of XLA for a result of HCCL.
BRIDGE_EXPORT int32_t deepinfer_ascend_classify_collective(int32_t result) {
  return static_cast<int32_t>(ClassifyCollective(result));
}

// The status code of XLA for a status of CANN, and whether it makes a device dirty.
BRIDGE_EXPORT int32_t deepinfer_ascend_classify(int32_t status, int32_t* dirties) {
  const StatusClass meaning = Classify(status);
  *dirties = meaning.dirties_device ? 1 : 0;
  return static_cast<int32_t>(meaning.code);
}

// Copies a host array to memory of its own on the device.
BRIDGE_EXPORT int32_t deepinfer_ascend_put(int32_t ordinal, int32_t dtype, const int64_t* dims, int32_t rank,
                                           const void* data, uint32_t* words) {
  return OnDevice(ordinal, [&](Device& device, HandleTable& handles) {
    Tensor tensor{static_cast<DataType>(dtype), Dims(dims, dims + rank), nullptr, Format::kNd, {}, {}};
    tensor.address = device.Allocate(static_cast<size_t>(BytesOf(tensor.dtype, tensor.dims)));
    try {
      device.Upload(tensor, data);
      device.Synchronize();  // the host array may go away once this returns
    } catch (const BridgeError&) {
      try {
        device.Free(tensor.address);
      } catch (const BridgeError&) {
        // The first failure is the one to tell; the memory is let go of later.
      }
      throw;
    }
    const Handle handle = handles.AddOwned(tensor);
    std::memcpy(words, handle.data(), sizeof handle);
  });
}

// Copies a device tensor into `bytes` bytes of host memory, after everything enqueued before.
BRIDGE_EXPORT int32_t deepinfer_ascend_get(const uint32_t* words, void* data, uint64_t bytes) {
  return OnDevice(OrdinalOf(words), [&](Device& device, HandleTable& handles) {
    const Tensor& tensor = handles.Get(words);
    const auto needed = static_cast<uint64_t>(BytesOf(tensor.dtype, tensor.dims));
    if (needed != bytes) {
      throw BridgeError(Code::kInvalidArgument, "the device tensor " + DimsText(tensor.dims) + " has " +
                                                    std::to_string(needed) + " bytes, and the host array has " +
                                                    std::to_string(bytes));
    }
    device.Download(data, tensor);
    device.Synchronize();
  });
}

// Gives the memory of a tensor made by `put` back, once the stream has passed.
BRIDGE_EXPORT int32_t deepinfer_ascend_release(const uint32_t* words) {
  return OnDevice(OrdinalOf(words), [&](Device&, HandleTable& handles) { handles.Release(words); });
}

BRIDGE_EXPORT int32_t deepinfer_ascend_end_step(int32_t ordinal) {
  return OnDevice(ordinal, [&](Device&, HandleTable& handles) { handles.EndStep(); });
}

BRIDGE_EXPORT int32_t deepinfer_ascend_synchronize(int32_t ordinal) {
  return OnDevice(ordinal, [&](Device& device, HandleTable&) { device.Synchronize(); });
}

// Drops all work and tensors of a device and takes it out of the dirty state.
BRIDGE_EXPORT int32_t deepinfer_ascend_reset(int32_t ordinal) {
  return Guarded([&] {
    Runtime& runtime = Runtime::Get();
    Device& device = runtime.device(ordinal);
    std::lock_guard<std::mutex> lock(device.mutex);
    runtime.handles(ordinal).Forget();
    device.Reset();
  });
}

// Live handles, and bytes of the arena in use, of one device.
BRIDGE_EXPORT int32_t deepinfer_ascend_usage(int32_t ordinal, int64_t* num_handles, uint64_t* arena_bytes) {
  return OnDevice(ordinal, [&](Device& device, HandleTable& handles) {
    *num_handles = handles.num_live();
    *arena_bytes = device.arena().mark();
  });
}
